"""Digests of Python code, by which ranks find out whether they run the same."""

import hashlib
import importlib.util
from pathlib import Path

from fullshard.spec.dotted import append_working_directory_to_path


def digest_of_code(module: str) -> str:
    """Returns a digest of the Python files of a package or module; `absent` if it is not found."""
    try:
        append_working_directory_to_path()
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return "absent"
    if found is None:
        return "absent"
    if found.submodule_search_locations:
        paths = [path for root in found.submodule_search_locations for path in Path(root).rglob("*.py")]
    else:
        paths = [Path(found.origin)] if found.origin else []
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()

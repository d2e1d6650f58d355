"""Settings files, read as TOML tables."""

from pathlib import Path
from typing import Any

from fullshard.errors import SpecError
from fullshard.spec.small_files import SETTINGS_BYTES, parse_toml, read_text


def read_toml(path: Path, *, fix: str) -> dict[str, Any]:
    """Returns the tables of the file.

    Raises SpecError for a file that is not TOML or has out-of-range numbers, and, with `fix`, for an
    unreadable one.
    """
    try:
        return parse_toml(read_text(path, most_bytes=SETTINGS_BYTES))
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror, fix=fix) from error
    except ValueError as error:
        raise SpecError(f"{path} cannot be read.", got=str(error)) from error

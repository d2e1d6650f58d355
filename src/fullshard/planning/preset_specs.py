"""The specs of presets, shipped with the package in `preset_specs.xz`, which `bench/preset_specs.py` writes.

Each preset is described as `fullshard plan NAME --on GPUS` requests it: for CUDA kernels, in bf16, at its own
sequence length up to 8,192, under every recompute setting that the planner tries. The specs are valid for one
version of torch, regardless of its build (`+cpu`, `+cu130`).

The file is LZMA over lines of UTF-8: the version of torch, then for each preset a line with its settings
(`fullshard.planning.spec_cache.SpecKey`) and one with its spec, both JSON.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fullshard.spec.model import ModelSpec
from fullshard.spec.small_files import VALUE_BYTES, read_bytes

FILE = Path(__file__).with_name("preset_specs.xz")


def shipped_spec(settings: str, *, torch: str) -> ModelSpec | None:
    """Returns the shipped spec for these settings and this version of torch, or None."""
    text = shipped(FILE, torch=public_version(torch)).get(settings)
    return None if text is None else ModelSpec.model_validate_json(text)


@cache
def shipped(path: Path, *, torch: str) -> Mapping[str, str]:
    """Returns {settings: spec} of the file at `path`, empty if it was made with another version of torch."""
    try:
        import lzma  # Python may be built without it

        data = read_bytes(path, most_bytes=VALUE_BYTES)
    except (ImportError, OSError):
        return {}
    made_with, *lines = lzma.decompress(data).decode().splitlines()
    return dict(zip(lines[::2], lines[1::2], strict=True)) if made_with == torch else {}


def packed(specs: Mapping[str, ModelSpec], *, torch: str) -> bytes:
    """Returns the contents of a file that ships `specs`, by settings."""
    import lzma

    lines = [public_version(torch)]
    for settings, spec in specs.items():
        lines += [settings, spec.model_dump_json()]
    return lzma.compress("\n".join(lines).encode(), preset=9)


def public_version(version: str) -> str:
    """Returns the version without its build: `2.13.0` for `2.13.0+cpu`."""
    return version.partition("+")[0]

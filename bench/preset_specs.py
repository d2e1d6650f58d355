"""Describes every preset, and writes the specs that the package ships.

    python bench/preset_specs.py

Run it after a change of what `describe` finds, and for a new version of torch. It takes about three seconds
of processor time for each preset.
"""

from importlib.metadata import version

from fullshard.planning.describe_run import describe_anew
from fullshard.planning.spec_cache import SHIPPED_FILE, key_of, pack_specs
from fullshard.planning.target import find_subject
from fullshard.spec.presets import presets

specs = {}
for preset in presets():
    run = find_subject(preset.name).run(["precision.mode=bf16"])
    key = key_of(run, "cuda")
    assert key is not None, "presets can be cached"
    specs[key.settings] = describe_anew(run, "cuda")
SHIPPED_FILE.write_bytes(pack_specs(specs, torch=version("torch")))
print(f"{SHIPPED_FILE}: {len(specs)} presets, {SHIPPED_FILE.stat().st_size:,} bytes")

"""Describes every preset, and writes the specs that the package ships.

    python bench/preset_specs.py

Run it after a change of what `describe` finds, and for a new version of torch. It takes about three seconds
of processor time for each preset.
"""

from importlib.metadata import version

from fullshard.planning.describe_run import describe_run
from fullshard.planning.spec_cache import SHIPPED_FILE, build_spec_key, compress_specs
from fullshard.planning.target import resolve_plan_target
from fullshard.spec.presets import read_presets

specs = {}
for preset in read_presets():
    run = resolve_plan_target(preset.name).load_run(["precision.mode=bf16"])
    key = build_spec_key(run, "cuda")
    assert key is not None, "presets can be cached"
    specs[key.settings] = describe_run(run, "cuda", cached=False)
SHIPPED_FILE.write_bytes(compress_specs(specs, torch=version("torch")))
print(f"{SHIPPED_FILE}: {len(specs)} presets, {SHIPPED_FILE.stat().st_size:,} bytes")

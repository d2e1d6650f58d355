"""Describes every preset, and writes the specs that the package ships.

    python bench/preset_specs.py

Run it after a change of what `describe` finds, and for a new version of torch. It takes about half a minute
of processor time for each preset. Of presets from 100B parameters on, the parts that each of 8 ranks has are
described too, since a batch often has fewer sequences than so many ranks.
"""

import lzma
from importlib.metadata import version

from fullshard.planner.describe.describe_run import (
    SHIPPED_FILE,
    build_spec_key,
    describe_run,
    version_without_build,
)
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.pretrained import read_presets
from fullshard.spec.settings.model_section import can_decoder_be_split

PER_NODE, LARGE = 8, 1e11
lines = [version_without_build(version("torch"))]
for preset in read_presets():
    for ranks in (1, PER_NODE):
        settings = ["precision.mode=bf16", f"sharding.tensor_parallel={ranks}"]
        run = resolve_model_to_plan(preset.name).load_run(settings)
        key = build_spec_key(run, "cuda")
        assert key is not None, "presets can be cached"
        spec = describe_run(run, "cuda", cached=False)
        lines += [key.settings, spec.model_dump_json()]
        if spec.numel < LARGE or not can_decoder_be_split(preset.model, PER_NODE):
            break
SHIPPED_FILE.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
print(f"{SHIPPED_FILE}: {len(lines) // 2} specs, {SHIPPED_FILE.stat().st_size:,} bytes")

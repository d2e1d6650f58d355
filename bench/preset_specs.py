"""Describes every preset and the default run, and writes the specs that the package ships.

    python bench/preset_specs.py [NAME …]

Run it after a change of what `describe` finds, and for a new version of torch. It takes about half a minute
of processor time for each preset; with names, it describes these, and keeps the others' specs. A model of
transformers is described for each kernel of attention, whose name is in its key. Of presets from 100B
parameters on, the parts that each of 8 ranks has are described too, since there are often more ranks than
sequences in a batch. The default run, whose name here is `default`, is described for CPU ranks, so that a
first run on them starts without a trace of 5 to 20 s.
"""

import lzma
import sys
from importlib.metadata import version
from typing import get_args

from fullshard.planner.describe.describe_run import (
    SHIPPED_FILE,
    build_spec_key,
    describe_run,
    read_shipped_specs,
    version_without_build,
)
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType
from fullshard.spec.pretrained import read_presets
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, can_decoder_be_split

PER_NODE, LARGE = 8, 1e11
torch = version_without_build(version("torch"))
kept = read_shipped_specs(SHIPPED_FILE, torch=torch) if sys.argv[1:] else {}
lines = [torch]


def add_spec(name: str, run: Run, device: DeviceType, *, kernel: AttentionKernel = "flash") -> ModelSpec:
    """Adds the spec of a run to the lines: the shipped one if other models are named, else a new one."""
    key = build_spec_key(run, device, attention_kernel=kernel)
    assert key is not None, "presets can be cached"
    if sys.argv[1:] and name not in sys.argv:
        spec = ModelSpec.model_validate_json(kept[key.settings])
    else:
        spec = describe_run(run, device, attention_kernel=kernel, cached=False)
    lines.extend([key.settings, spec.model_dump_json()])
    return spec


for preset in read_presets():
    is_decoder = isinstance(preset.model, DecoderConfig)
    for ranks in (1, PER_NODE):
        settings = ["precision.mode=bf16", f"sharding.tensor_parallel={ranks}"]
        run = resolve_model_to_plan(preset.name).load_run(settings)
        kernels = ("flash",) if is_decoder else get_args(AttentionKernel)
        spec = [add_spec(preset.name, run, "cuda", kernel=kernel) for kernel in kernels][-1]
        can_be_split = isinstance(preset.model, DecoderConfig) and can_decoder_be_split(
            preset.model, PER_NODE
        )
        if spec.numel < LARGE or not can_be_split:
            break
for mode in ("none", "auto"):  # a first run tries the first, and traces the second only if it may pay
    add_spec("default", Run.load(overrides=["precision.mode=fp32", f"recompute.mode={mode}"]), "cpu")
SHIPPED_FILE.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
print(f"{SHIPPED_FILE}: {len(lines) // 2} specs, {SHIPPED_FILE.stat().st_size:,} bytes")

"""Describes every preset and the default run, and writes the specs that the package ships.

    python -m bench.preset_specs [NAME …]

Run it after a change of what `describe` finds. The first line of a file names the version of torch that it
ran with; add others with which `test_a_shipped_spec_equals_a_fresh_one` passes. It takes about ten seconds
of processor time for each spec; with names, it describes these presets, and keeps the others' specs. A model
of transformers is described for each kernel of attention, whose name is in its key. Of presets from LARGE
parameters on, the parts that each of 2, 4 and 8 ranks has of its matmuls are described too, for the kernel
of H100 and later, since there are often more ranks than sequences in a batch. A mixture is also described
for each number of ranks, in nodes of 8, that may divide their experts, in a second file: three are traced,
and the others follow. A third file has two specs of each dense reference decoder that is made for more than
LONG tokens, and of each division of its matmuls, from eight traces: with whole sequences, and with sequences
that ranks share. The specs of other sequence lengths follow from these. The default run, whose name here is
`default`, is described for CPU ranks, so that a first run there starts without a trace of 5 to 20 s.
"""

import json
import lzma
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from bench.length_specs import describe_lengths
from fullshard.planner.describe.describe_run import (
    OFF,
    SHIPPED_EXPERTS_FILE,
    SHIPPED_FILE,
    SHIPPED_LENGTHS_FILE,
    VARIABLE,
    build_spec_key,
    describe_run,
    read_shipped_specs,
    version_without_build,
)
from fullshard.planner.describe.sequence_lengths import settings_for_any_length
from fullshard.planner.search.parallel_degrees import iterate_expert_degrees, iterate_tensor_degrees
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.machine.hardware import AttentionKernel
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType
from fullshard.spec.pretrained import read_presets
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig

PER_NODE, LARGE, LONG = 8, 8e9, 8192
H100_KERNEL: AttentionKernel = "cudnn_256"
FILES = (SHIPPED_FILE, SHIPPED_EXPERTS_FILE, SHIPPED_LENGTHS_FILE)
torch = version_without_build(version("torch"))
os.environ[VARIABLE] = OFF  # nothing is read from the cache
kept = {path: read_shipped_specs(path, torch=torch) for path in FILES}
lines = {path: [torch] for path in kept}


def add_spec(
    name: str, run: Run, device: DeviceType, *, kernel: AttentionKernel = "flash", path: Path = SHIPPED_FILE
) -> ModelSpec | None:
    """Adds the spec of a run to the lines: the shipped one, if any, if others are named, else a new one."""
    key = build_spec_key(run, device, attention_kernel=kernel)
    assert key is not None, "presets can be cached"
    if sys.argv[1:] and name not in sys.argv:
        text = kept[path].get(key.settings)
        spec = text and ModelSpec.model_validate_json(text)
    else:
        spec = describe_run(run, device, attention_kernel=kernel)
    if spec:
        lines[path].extend([key.settings, spec.model_dump_json()])
    return spec or None


def add_specs_of_divided_experts(name: str, run: Run, spec: ModelSpec, *, kernel: AttentionKernel) -> None:
    hardware = hardware_on(f"{max(spec.expert_count_gcd, 1)}x{PER_NODE}xH100")
    for degree in iterate_expert_degrees(hardware, spec.expert_count_gcd):
        own = run.with_settings({"sharding": {"expert_parallel": degree}})
        add_spec(name, own, "cuda", kernel=kernel, path=SHIPPED_EXPERTS_FILE)


def add_specs_of_all_lengths(name: str, run: Run) -> None:
    """Adds the specs from which those of any length follow, with whole sequences and with shared ones."""
    for shared in (False, True):
        own = run.with_settings({"sharding": {"context_parallel": 1 + shared}})
        key = build_spec_key(own, "cuda")
        assert key is not None, "presets can be cached"
        settings = settings_for_any_length(json.loads(key.settings))
        if settings in lines[SHIPPED_LENGTHS_FILE]:
            continue  # another preset differs only in its length
        text = kept[SHIPPED_LENGTHS_FILE].get(settings)
        if not sys.argv[1:] or name in sys.argv:
            text = describe_lengths(own, "cuda", shared=shared)
        if text:
            lines[SHIPPED_LENGTHS_FILE].extend([settings, text])


for preset in read_presets():
    model, numel = preset.model, 0
    is_decoder = isinstance(model, DecoderConfig)
    whole = resolve_model_to_plan(preset.name).load_run(["precision.mode=bf16"])
    open_run = whole.with_settings({"sharding": {"tensor_parallel": "auto"}})
    for tensor in (1, *iterate_tensor_degrees(open_run, per_node=PER_NODE)):
        if tensor > 1 and numel < LARGE:
            break
        run = whole.with_settings({"sharding": {"tensor_parallel": tensor}})
        kernels = ("flash",) if is_decoder else get_args(AttentionKernel) if tensor == 1 else (H100_KERNEL,)
        for kernel in kernels:
            spec = add_spec(preset.name, run, "cuda", kernel=kernel)
            assert spec is not None, "every preset is shipped with whole experts"
            numel = max(numel, spec.numel)
            add_specs_of_divided_experts(preset.name, run, spec, kernel=kernel)
        if isinstance(model, DecoderConfig) and not model.is_mixture and model.max_sequence > LONG:
            add_specs_of_all_lengths(preset.name, run)
for mode in ("none", "auto"):  # a first run tries the first, and traces the second only if it may pay
    add_spec("default", Run.load(overrides=["precision.mode=fp32", f"recompute.mode={mode}"]), "cpu")
for path, own_lines in lines.items():
    path.write_bytes(lzma.compress("\n".join(own_lines).encode(), preset=9))
    print(f"{path}: {len(own_lines) // 2} specs, {path.stat().st_size:,} bytes")

"""Released weights in low-bit formats load as the values of their publishers' formulas, bit for bit."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fullshard.errors import CheckpointError
from fullshard.jobs.train import run_job
from fullshard.models.huggingface import build_hf_model
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.resume import find_pretrained_directory
from fullshard.training.shard import shard
from fullshard.weights.export_hf import export_hf
from fullshard.weights.pretrained import LoadReport, fill_selected_tensors, load_pretrained
from tests.checkpoint.states import assert_same
from tests.fakes.families import FAMILIES
from tests.fakes.plans import plan_of
from tests.weights.hugging_face import whole

transformers = pytest.importorskip("transformers")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

ROWS, COLUMNS = 40, 96  # three ranks have 14, 14 and 12 rows: no multiple of a block or of a word


@dataclass(frozen=True)
class Published:
    """A weight as its publisher stores it: tensors by the ends of their names, and what they stand for."""

    tensors: dict[str, Tensor]
    quantization: dict[str, Any]
    weight: Tensor


def scales_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 7 + 0.01).to(dtype)


def codes_of(shape: tuple[int, ...], *, bits: int = 4, seed: int = 2) -> Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))


def fp8_codes(shape: tuple[int, ...]) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 60
    return values.to(torch.float8_e4m3fn)


def spread(scales: Tensor, rows: int, columns: int, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Tensor:
    """Scales of blocks, repeated for each element."""
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def packed(codes: Tensor, *, bits: int = 4, order: tuple[int, ...] = ()) -> Tensor:
    """Codes of the last dim in words of 32 bits, in plain integers: the first in the lowest bits."""
    per = 32 // bits
    order = order or tuple(range(per))
    rows = [
        [sum(row[at + column] << bits * place for place, column in enumerate(order) if at + column < len(row))
         for at in range(0, len(row), per)]
        for row in codes.tolist()
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def deepseek(scale_dtype: torch.dtype = torch.float32) -> Published:
    """kernel.py of DeepSeek-V3: blocks that the matrix does not fill, the product in fp32, then bf16."""
    codes, scales = fp8_codes((ROWS, COLUMNS)), scales_of((3, 3)).to(scale_dtype)
    weight = (codes.float() * spread(scales.float(), 16, 40)).bfloat16()
    settings = {"quant_method": "fp8", "weight_block_size": [16, 40], "activation_scheme": "dynamic"}
    return Published({".weight": codes, ".weight_scale_inv": scales}, settings, weight)


def mistral() -> Published:
    codes, scale = fp8_codes((ROWS, COLUMNS)), scales_of(()).bfloat16()
    tensors = {".weight": codes, ".qscale_weight": scale, ".qscale_act": scales_of(())}
    settings = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    return Published(tensors, settings, (codes.float() * scale.float()).bfloat16())


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    settings = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return {**settings, "ignore": ["norm"], "quantization_status": "compressed"}


def floats(shape: tuple[int, ...], dtype: torch.dtype) -> Published:
    codes, scales = fp8_codes((ROWS, COLUMNS)), scales_of(shape, dtype)
    tensors = {".weight": codes, ".weight_scale": scales, ".input_scale": scales_of((1,))}
    settings = compressed("float-quantized", num_bits=8, type="float")
    return Published(tensors, settings, (codes.to(dtype) * scales).to(min_16(dtype)))


def min_16(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else dtype


def integers() -> Published:
    codes = codes_of((ROWS, COLUMNS), bits=8).sub(128).to(torch.int8)
    points, scales = codes_of((ROWS, 1), seed=5).to(torch.int8), scales_of((ROWS, 1), torch.bfloat16)
    tensors = {".weight": codes, ".weight_scale": scales, ".weight_zero_point": points}
    settings = compressed("int-quantized", num_bits=8, type="int", symmetric=False)
    return Published(tensors, settings, (codes.bfloat16() - points.bfloat16()) * scales)


def words(
    *, bits: int = 4, group: int | None = 32, zeros: bool = False, order: bool = False, columns: int = COLUMNS
) -> Published:
    """pack-quantized of compressed-tensors: signed codes, zero points packed along the outputs."""
    half, width, dtype = 1 << bits - 1, group or columns, torch.float16 if zeros else torch.bfloat16
    codes, scales = codes_of((ROWS, columns), bits=bits), scales_of((ROWS, -(-columns // width)), dtype)
    points = codes_of(tuple(scales.shape), bits=bits, seed=5)
    group_of = torch.arange(columns) // width
    tensors = {
        ".weight_packed": packed(codes, bits=bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([ROWS, columns]),
    }
    if order:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(6))]
        tensors[".weight_g_idx"] = group_of.int()
    if zeros:
        tensors[".weight_zero_point"] = packed(points.T, bits=bits).T.contiguous()
    signed = (codes - half).to(dtype) - ((points - half).to(dtype)[:, group_of] if zeros else 0)
    settings = compressed("pack-quantized", num_bits=bits, type="int", group_size=group, symmetric=not zeros)
    return Published(tensors, settings, signed * scales[:, group_of])


def gptq(*, bits: int = 4, layout: str = "gptq") -> Published:
    """GPTQModel: inputs packed in words, act order, and zero points minus 1 in the first format."""
    groups = COLUMNS // 32
    codes, scales = codes_of((COLUMNS, ROWS), bits=bits), scales_of((groups, ROWS), torch.float16)
    points = codes_of((groups, ROWS), bits=bits, seed=5)
    ones = sum(1 << place for place in range(0, 32, bits))  # subtracted from whole words, as GPTQModel does
    order = torch.arange(COLUMNS)[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(6))] // 32
    tensors = {
        ".qweight": packed(codes.T, bits=bits).T.contiguous(),
        ".qzeros": packed(points, bits=bits) - (ones if layout == "gptq" else 0),
        ".scales": scales,
        ".g_idx": order.int(),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": layout}
    return Published(tensors, settings, (scales[order] * (codes - points[order])).T.contiguous())


def awq() -> Published:
    """AutoAWQ's gemm: outputs packed in words, in the order 0 2 4 6 1 3 5 7."""
    groups, order = COLUMNS // 32, (0, 2, 4, 6, 1, 3, 5, 7)
    codes, scales = codes_of((COLUMNS, ROWS)), scales_of((groups, ROWS), torch.float16)
    points = codes_of((groups, ROWS), seed=5)
    tensors = {
        ".qweight": packed(codes, order=order),
        ".qzeros": packed(points, order=order),
        ".scales": scales,
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    weight = (codes - points.repeat_interleave(32, 0)) * scales.repeat_interleave(32, 0)
    return Published(tensors, settings, weight.T.contiguous())


FORMATS: dict[str, Callable[[], Published]] = {
    "fp8 in blocks": deepseek,
    "fp8 in blocks, E8M0 scales": lambda: deepseek(torch.float8_e8m0fnu),
    "fp8 per tensor": mistral,
    "fp8 per row": lambda: floats((ROWS, 1), torch.bfloat16),
    "fp8 per row, fp32 scales": lambda: floats((ROWS, 1), torch.float32),
    "fp8 with one scale": lambda: floats((1,), torch.bfloat16),
    "int8 with zero points": integers,
    "int4 in groups": words,
    "int4 in groups with zero points": lambda: words(zeros=True),
    "int4 per row, half a word": lambda: words(group=None, columns=70),
    "int4 with act order": lambda: words(order=True),
    "int8 in words": lambda: words(bits=8, zeros=True),
    "gptq": gptq,
    "gptq v2": lambda: gptq(layout="gptq_v2"),
    "gptq of 8 bits": lambda: gptq(bits=8),
    "gptq of 2 bits": lambda: gptq(bits=2),
    "awq": awq,
}


def publish(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def small_model(columns: int) -> nn.Module:
    model = nn.Sequential()
    model.add_module("up", nn.Linear(columns, ROWS, bias=False))
    model.add_module("norm", nn.LayerNorm(5, bias=False))
    return model


def loaded_in_shards(directory: Path, columns: int) -> tuple[LoadReport, dict[str, Tensor]]:
    with torch.device("meta"):
        model = small_model(columns)
    plan = plan_of(dist.get_world_size(), "sharding.units.min_parameters=9")
    shard(model, plan, init="none")
    loaded = fill_selected_tensors(model, directory)
    return loaded, {name: whole(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_hold_the_values_of_the_publishers_formula(ranks, tmp_path, name):
    published = FORMATS[name]()
    tensors = {f"up{ending}": one for ending, one in published.tensors.items()}
    tensors["norm.weight"] = norm = torch.randn(5).bfloat16()  # is not quantised
    publish(tmp_path, tensors, {"quantization_config": published.quantization, "torch_dtype": "bfloat16"})
    expected = {"up.weight": published.weight.float(), "norm.weight": norm.float()}
    assert expected["up.weight"].unique().numel() > 100
    assert published.weight.dtype.itemsize == 2
    for count in (1, 2, 3):
        loaded, values = ranks(count).run(loaded_in_shards, tmp_path, published.weight.shape[1])[0]
        assert_same(values, expected)
        assert (loaded.missing, loaded.surplus) == ((), ())
        assert loaded.dtypes == {"low-bit codes → float32": 1, "bfloat16 → float32": 1}


SHORT = ("train.steps=1", "train.global_batch=4", "data.sequence_length=16", "run.device=cpu")
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 40], "modules_to_not_convert": ["lm_head"]}
_MIXTURE = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}


def released(name: str, directory: Path) -> tuple[Path, Path]:
    """Directories of a model as it is released, in low bits, and of the same values in bf16."""
    config = FAMILIES[name] | {"vocab_size": 256} | (_MIXTURE if name == "gpt_oss" else {})
    values = {key: value for key, value in config.items() if key != "model_type"}
    made = getattr(transformers, config["architectures"][0])
    torch.manual_seed(3)
    model = made(transformers.AutoConfig.for_model(config["model_type"], **values)).bfloat16()
    low, full = directory / "low", directory / "full"
    for one in (low, full):
        model.save_pretrained(one)
    codes, weights = quantise(name, load_file(full / "model.safetensors"))
    save_file(weights, full / "model.safetensors", {"format": "pt"})
    saved = json.loads((full / "config.json").read_text())
    method = {"quant_method": "mxfp4"} if name == "gpt_oss" else FP8
    publish(low, codes, {**saved, "quantization_config": method})
    return low, full


def quantise(name: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the tensors with layers in low bits, as they are published, and the values they stand for."""
    codes, weights = dict(tensors), dict(tensors)
    for number, (key, weight) in enumerate(tensors.items()):
        seed = torch.Generator().manual_seed(number)
        if name == "gpt_oss" and key.endswith("_proj") and weight.ndim == 3:
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=seed).byte()
            scales = torch.randint(118, 125, (experts, outputs, inputs // 32), generator=seed).byte()
            codes |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            weights[key] = mxfp4.convert_moe_packed_tensors(blocks, scales)
            del codes[key]
        elif name != "gpt_oss" and key.endswith("_proj.weight"):
            rows, columns = weight.shape
            scales = torch.rand((-(-rows // 16), -(-columns // 40)), generator=seed) / 99
            codes[key] = fp8_codes((rows, columns))
            codes[f"{key}_scale_inv"] = scales
            values = codes[key].float() * spread(scales, 16, 40, (rows, columns))
            weights[key] = values.bfloat16()
    return codes, weights


def imported(directory: Path) -> tuple[LoadReport, dict[str, Tensor]]:
    plan = plan_of(dist.get_world_size())
    model = shard(build_hf_model(HuggingFaceModel(hf=str(directory))), plan, init="none")
    loaded = load_pretrained(model, directory, plan=plan)
    return loaded, {name: whole(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "mixtral", "gpt_oss"])
def test_stacked_experts_of_released_models_are_those_of_the_same_model_in_bf16(ranks, tmp_path, name):
    low, full = released(name, tmp_path)
    expected = ranks(1).run(imported, full)[0][1]
    for count in (1, 3):
        loaded, tensors = ranks(count).run(imported, low)[0]
        assert_same(tensors, expected)
        assert (loaded.missing, loaded.surplus) == ((), ())
        assert "low-bit codes" in loaded.describe()


def test_each_rank_reads_the_codes_and_scales_of_its_rows_alone(ranks, tmp_path):
    published = deepseek()
    tensors = {f"up{ending}": one for ending, one in published.tensors.items()}
    norm = {"norm.weight": torch.ones(5).bfloat16()}
    publish(tmp_path, tensors | norm, {"quantization_config": published.quantization})
    read = [loaded.read_bytes for loaded, _ in ranks(3).run(loaded_in_shards, tmp_path, COLUMNS)]
    # Rows 0 to 13, 14 to 27, 28 to 39 lie in one, two and two rows of blocks, with 3 scales of 4 bytes each.
    assert read == [14 * COLUMNS + 12 + 4, 14 * COLUMNS + 24 + 4, 12 * COLUMNS + 24 + 2]


def trained(directory: str, source: str) -> None:
    settings = (f"run.dir={directory}", f"model.hf={source}", "model.weights=require", *SHORT)
    run = Run.load(overrides=["data.source=stdlib", *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    run_job(plan.run, resume=False, plan=plan, command_started=time.time())


def test_training_and_export_of_a_released_model_are_those_of_the_same_model_in_bf16(ranks, tmp_path):
    low, full = released("llama", tmp_path)
    for source in (low, full):
        ranks(2).run(trained, f"{source}-run", str(source))
        export_hf(f"{source}-run/checkpoints", f"{source}-out", dtype="bf16")
    (after, expected) = (load_file(f"{source}-out/model.safetensors") for source in (low, full))
    assert_same(after, expected)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert not torch.equal(after["lm_head.weight"], load_file(full / "model.safetensors")["lm_head.weight"])
    assert "quantization_config" not in json.loads(Path(f"{low}-out/config.json").read_text())


@pytest.mark.parametrize(("name", "part"), [("gpt_oss", ""), ("llava", "text_config")])
def test_a_quantised_config_is_described_as_the_dequantised_model(tmp_path, name, part):
    config = json.loads(json.dumps(FAMILIES[name]))
    shapes: list[dict[str, Any]] = []
    for settings in ({"quant_method": "mxfp4"}, None):
        (config[part] if part else config)["quantization_config"] = settings
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = build_hf_model(HuggingFaceModel(hf=str(tmp_path)))
        assert all(getattr(one, "quantization_config", None) is None for one in configs_of(model))
        shapes.append({name: one.shape for name, one in model.named_parameters()})
    assert shapes[0] == shapes[1]


def configs_of(model: Any) -> list[Any]:
    return [model.config, model.config.get_text_config()]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes(.|\n)*dequantize"),
    "another method": ({"quant_method": "hqq"}, "hqq"),
    "no method": ({"bits": 4}, "None"),
    "bits that fill no words": ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
    "another layout of words": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, gemv"),
    "sparse weights": (compressed("marlin-24"), "compressed-tensors, marlin-24"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_format_that_is_not_read_is_refused_by_name_before_the_model_is_built(tmp_path, case):
    settings, says = REFUSED[case]
    publish(tmp_path, {"up.weight": torch.ones(3)}, {"quantization_config": settings})
    with pytest.raises(CheckpointError, match=says):
        find_pretrained_directory(plan_of(1, f"model.hf={tmp_path}").run)
    with pytest.raises(CheckpointError, match=says):
        load_pretrained(small_model(COLUMNS), tmp_path)


DAMAGES: dict[str, tuple[Callable[[], Published], dict[str, Tensor | None]]] = {
    "scales of another shape": (deepseek, {".weight_scale_inv": torch.ones(7, 5)}),
    "no scales": (gptq, {".scales": None}),
    "scales that are integers": (gptq, {".scales": torch.ones(3, ROWS, dtype=torch.int32)}),
    "zero points of another shape": (awq, {".qzeros": torch.ones(2, 5, dtype=torch.int32)}),
    "words that are floats": (awq, {".qweight": torch.ones(COLUMNS, 5)}),
    "groups of another length": (gptq, {".g_idx": torch.ones(3, dtype=torch.int32)}),
    "groups without a scale": (gptq, {".g_idx": torch.full((COLUMNS,), 3, dtype=torch.int32)}),
    "a shape of more words": (words, {".weight_shape": torch.tensor([ROWS, 9999])}),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_codes_that_do_not_fit_to_their_scales_are_refused(tmp_path, case):
    make, changed = DAMAGES[case]
    published = make()
    tensors = {f"up{end}": one for end, one in (published.tensors | changed).items() if one is not None}
    publish(tmp_path, tensors, {"quantization_config": published.quantization})
    with pytest.raises(CheckpointError, match="do not fit to their scales|columns without a scale"):
        load_pretrained(small_model(COLUMNS), tmp_path)

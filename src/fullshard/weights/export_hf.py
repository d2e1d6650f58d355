"""export_hf: writes a checkpoint as a directory that transformers' `from_pretrained` loads."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import JsonValue
from torch import nn

from fullshard.checkpoint.load import resolve_checkpoint
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import Manifest
from fullshard.data.chat_template import ChatTemplate
from fullshard.data.tokenizer import MORE_TEMPLATES, find_tokenizer, open_tokenizer_safely
from fullshard.data.worker import call_in_worker
from fullshard.errors import CheckpointError, DataError, MissingExtraError, SpecError
from fullshard.models.adapted_parameters import name_in_base
from fullshard.models.adapters import ADAPTER, has_transposed_weight, insert_adapters, iterate_adapted_layers
from fullshard.models.decoder import DecoderModel
from fullshard.models.huggingface import build_hf_model, remove_code_references
from fullshard.quantities import count_text
from fullshard.spec.pretrained import locate_config_file
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel
from fullshard.spec.weight_map import Naming
from fullshard.system.files import os_errors_as_checkpoint_errors
from fullshard.system.small_files import parse_json, read_bytes
from fullshard.weights import export
from fullshard.weights.names import (
    build_meta_model,
    full_transformers_config,
    llama_config,
    llama_weight_map,
    map_model_tensors_to_file,
    with_special_floats,
)
from fullshard.weights.tensor_source import (
    ADDED,
    LORA_FACTORS,
    LayerMerging,
    Weights,
    merge_error,
    open_model_tensors,
    select_model_tensors,
)

SHARD_BYTES = 5_000_000_000  # per file, as on the Hugging Face Hub
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MOST_BYTES = 64 << 20
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TEMPLATE, _TEMPLATE_SUFFIX = "chat_template.jinja", ".jinja"  # preferred to that in tokenizer_config.json
# Files of tokenizers and of image and audio processors in Hugging Face repositories.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    _TEMPLATE,
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "preprocessor_config.json",
    "processor_config.json",
)

# Names in transformers 4 of the base, of the rotated fraction of a head, and of the base of local layers.
_ROPE_NAMES = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct", ""),
    "modernbert": ("global_rope_theta", "", "local_rope_theta"),
    "others": ("rope_theta", "partial_rotary_factor", "rope_local_base_freq"),
}

logger = logging.getLogger("fullshard")


def export_hf(
    checkpoint: str | Path | CheckpointLocation,
    directory: str | Path,
    *,
    dtype: Literal["bf16", "fp32"] | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: Weights = "model",
) -> None:
    """Writes a checkpoint as a Hugging Face model.

    The checkpoint may come from any number of ranks and any strategy. The export runs in one process without
    a GPU. The directory gets the weights under the names that `from_pretrained` expects, config.json and
    generation_config.json, whose eos_token_id gets the tokens that end documents and turns of the training
    data, and the tokenizer files that still exist: those of data.tokenizer, or those of the model if the data
    were tokens already. Memory use is at most a few hundred megabytes for any model (or one
    row of a tensor's first dim, if that is larger). The reference decoder is written as a Llama.

    dtype: dtype of all floating-point tensors; None keeps the trained dtypes
    shard_bytes: largest size of a file, bytes
    weights: "ema" writes the averages of the trained parameters in place of them

    Raises CheckpointError for other models that transformers does not know, and for a directory that already
    holds weights; MissingExtraError; SpecError for another `dtype` and for a `shard_bytes` below 1.

    >>> fs.export_hf("checkpoints", "llama", dtype="bf16")
    >>> transformers.AutoModelForCausalLM.from_pretrained("llama").config.hidden_size
    32
    """
    _check_options(Path(directory), dtype=dtype, shard_bytes=shard_bytes)
    _, manifest = resolve_checkpoint(checkpoint)
    run = manifest.run_settings
    recorded = manifest.values.get("huggingface")
    names = export.names_without_wrappers(manifest.model_tensors)
    known = describe_for_transformers(recorded, run, doing=f"exporting {checkpoint}")
    merging = layer_merging_of_run(names, recorded=recorded, run=run)
    config, dtype_name = known.config, _config_dtype_name(manifest, dtype, weights=weights)
    for part in _iterate_config_parts(config):
        part.pop("use_cache", None)  # training disables the key/value cache, which generation needs
        if part is config or {"dtype", "torch_dtype"} & part.keys():
            part["dtype"] = dtype_name
        part.pop("torch_dtype", None)
    with os_errors_as_checkpoint_errors("a file of the tokenizer or the model cannot be copied."):
        paths = _list_files_to_copy(run)
        beside = {name: read_bytes(path, most_bytes=_MOST_BYTES) for name, path in paths.items()}
    if known.generation_config is not None:
        beside.setdefault(_GENERATION, known.generation_config)
    add_end_tokens(config, beside, ends=find_end_tokens(run))
    beside[_CONFIG] = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    export.write_export(
        checkpoint,
        Path(directory),
        naming=known.naming,
        beside=beside,
        dtype=_DTYPES[dtype] if dtype else None,
        shard_bytes=shard_bytes,
        open_source=partial(open_model_tensors, weights=weights, merging=merging),
    )
    if not any(name in beside for name in _TOKENIZER):
        logger.info("no tokenizer was written: the run had none, or its files are gone")


def _check_options(directory: Path, *, dtype: str | None, shard_bytes: int) -> None:
    export.check_shard_bytes(shard_bytes)
    if dtype is not None and dtype not in _DTYPES:
        raise SpecError(
            "this is no dtype of an export.", got=f"dtype = {dtype!r}", fix='"bf16", "fp32" or None'
        )
    export.check_holds_no_weights(directory)


@dataclass(frozen=True)
class _HFDescription:
    """Description of a model for transformers.

    config: contents of config.json
    naming: maps the model's tensors to those of the files
    generation_config: contents of generation_config.json; None if the model does not generate
    meta_model: the model on the meta device; None for the reference decoder
    """

    config: dict[str, Any]
    naming: Naming
    generation_config: bytes | None = None
    meta_model: Any = None


def describe_for_transformers(recorded: JsonValue, run: Run | None, *, doing: str) -> _HFDescription:
    """Returns the description of a model from its complete config, `recorded`, or else from `run`."""
    if recorded is None and run is not None and isinstance(run.model, DecoderConfig):
        return _HFDescription(llama_config(run.model), llama_weight_map)
    if recorded is None and run is not None and isinstance(run.model, HuggingFaceModel):
        # Whoever wrote the checkpoint chose these settings, which may name code to run.
        plain = {"options": remove_code_references(run.model.options), "attention": "auto"}
        model = run.model.model_copy(update={"trust_remote_code": False, **plain})
        recorded = full_transformers_config(build_hf_model(model))
    if not isinstance(recorded, dict):
        named = None if run is None or isinstance(run.model, DecoderConfig) else run.model.setting_text
        raise CheckpointError(
            "only models that transformers knows can be exported for it.",
            got="a checkpoint without settings" if named is None else named,
            fix="--format safetensors, which writes the tensors by their own names"
            + ("; or save with `plan=`, whose settings name the model" if run is None else ""),
        )
    twin = build_meta_model(cast(dict[str, Any], recorded), needed_for=doing)
    config: dict[str, Any] = json.loads(twin.config.to_json_string())
    older = _with_rope_of_transformers_4(config)
    read_again = type(twin.config).from_dict(with_special_floats(older))
    if _with_rope_of_transformers_4(json.loads(read_again.to_json_string())) == older:
        config = older
    else:
        logger.warning(
            "config.json has rope_parameters, for transformers 5 alone: rope_theta and rope_scaling, which "
            "older programs read, cannot describe this model"
        )
    config["architectures"] = recorded["architectures"]
    generation: bytes | None = None
    if getattr(twin, "generation_config", None) is not None and twin.can_generate():
        generation = twin.generation_config.to_json_string().encode()
    return _HFDescription(config, partial(map_model_tensors_to_file, twin), generation, twin)


def layer_merging_of_run(
    names: Mapping[str, str], *, recorded: JsonValue, run: Run | None
) -> dict[str, LayerMerging] | None:
    """Returns how each layer's adapter is merged, by the layer's saved name; None without adapters.

    names: saved names of a model's tensors, and those in the model
    recorded: the model's complete config for transformers; None for the reference decoder

    Raises CheckpointError if a merged model would not compute what the trained one does.
    """
    saved = {name.partition(ADDED)[0]: names[name].partition(ADDED)[0] for name in names if ADDED in name}
    if not saved:
        return None
    if run is None or run.adapter.rank == 0:
        fix = "--format safetensors, which writes the tensors by their own names"
        raise merge_error("no [adapter] in the checkpoint's run", fix=fix)
    base, model = build_base_and_adapted_meta_models(recorded, run)
    layers = layer_merging_by_name(model, base=base)
    if others := [name for name, module in saved.items() if module not in layers]:
        raise merge_error(f"adapters of other modules than the checkpoint's run has: {', '.join(others[:4])}")
    return {name: layers[module] for name, module in saved.items()}


def build_base_and_adapted_meta_models(recorded: JsonValue, run: Run) -> tuple[nn.Module, nn.Module]:
    """Builds the model of `run` on the meta device without adapters and, as in training, with them.

    recorded: its complete config for transformers; None for the reference decoder

    Raises CheckpointError for models that transformers does not know; MissingExtraError, SpecError.
    """

    def build_base() -> nn.Module:
        if isinstance(run.model, DecoderConfig):
            with torch.device("meta"):
                return DecoderModel(run.model)
        return describe_for_transformers(recorded, run, doing="exporting adapters").meta_model

    return build_base(), insert_adapters(build_base(), run.adapter)


def layer_merging_by_name(model: nn.Module, *, base: nn.Module) -> dict[str, LayerMerging]:
    """Returns how the adapter of each layer of `model` is merged into `base`, by the layer's name.

    model: with adapters, on the meta device
    base: the same model without adapters, as it is loaded from the export

    Raises CheckpointError unless the merged model would compute what `model` does: every tensor that an
    export writes has a place in `base`, no other module uses an adapted weight, and each adapted layer
    computes W x + scale · B A x.
    """
    names = {name_in_base(name): one for name, one in model.state_dict().items() if ADDED not in name}
    there = {name: one.shape for name, one in base.state_dict().items()}
    absent = [name for name, one in names.items() if there.get(name) != one.shape]
    if absent:
        raise _merge_error(
            f"{count_text(len(absent), 'tensor')} not as in the base model: {', '.join(absent[:4])}"
        )
    adapted = dict(iterate_adapted_layers(model))
    layers = {name: _layer_merging(name, layer) for name, layer in adapted.items()}
    merged = {name_in_base(f"{name}.{one.parameter}") for name, one in layers.items()}
    _check_no_adapted_weight_is_shared(base, merged)
    return layers


def _layer_merging(name: str, layer: Any) -> LayerMerging:
    """Returns how a layer is merged. Raises CheckpointError unless it computes W x + scale · B A x."""
    base, added = layer.base_layer, {key for key, _ in layer.named_parameters() if "base_layer" not in key}
    wrapped, whole = getattr(layer, "parameter_name", None), layer.get_base_layer()
    is_turned = type(base) is nn.Embedding or has_transposed_weight(base)
    is_known = is_turned or type(base) is nn.Linear or wrapped is not None
    is_sum = any(added == {one.removeprefix(".") for one in pair} for pair in LORA_FACTORS)
    variants = getattr(layer, "lora_variant", None)  # of peft: such as DoRA, which norms the sum
    if not is_known or not is_sum or variants or ADAPTER not in layer.scaling:
        kind = "DoRA" if getattr(layer, "use_dora", {}).get(ADAPTER) else type(layer).__name__
        raise _merge_error(f"{name}, {kind} of {type(base).__name__} with {sorted(added)}")
    if wrapped is not None:
        is_stack = getattr(whole, wrapped).ndim == 3
        is_turned = is_stack and getattr(whole, "is_transposed", False)
        return LayerMerging(layer.scaling[ADAPTER], is_turned, wrapped, layer.num_experts if is_stack else 0)
    return LayerMerging(layer.scaling[ADAPTER], is_turned)


def _merge_error(got: str, why: str = "only W + scale · B A can be merged into W") -> CheckpointError:
    return merge_error(got, why=why, fix="--format peft, which keeps them apart")


def _check_no_adapted_weight_is_shared(base: nn.Module, merged: Set[str]) -> None:
    """Raises CheckpointError if another module uses a weight to which an adapter would be added."""
    sharing: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(parameter), []).append(name)
    for names in sharing.values():
        if len(names) > 1 and not merged.isdisjoint(names):
            raise _merge_error(
                f"an adapter of a weight that two modules share: {', '.join(names)}",
                why="the merged weight would also change the module that was trained without the adapter",
            )


def _iterate_config_parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a config.json, and the tables in it, such as those of parts of the model."""
    yield config
    for part in config.values():
        if isinstance(part, dict):
            yield from _iterate_config_parts(cast(dict[str, Any], part))


def _with_rope_of_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` with the rotary positions also under the names that transformers 4 reads.

    transformers 5 writes them as rope_parameters alone, whose absence older programs do not notice.
    """
    parts = {
        key: _with_rope_of_transformers_4(cast(dict[str, Any], value)) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    rope = cast(dict[str, Any], config.get("rope_parameters") or {})
    local, rope = cast(dict[str, Any], rope.get("sliding_attention")), rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        return parts
    theta, fraction, local_theta = _ROPE_NAMES.get(str(config.get("model_type")), _ROPE_NAMES["others"])
    older = {theta: rope["rope_theta"]}
    if "partial_rotary_factor" in rope:
        older[fraction] = rope["partial_rotary_factor"]
    if local:
        older[local_theta] = local["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        apart = ("rope_theta", "partial_rotary_factor")
        older["rope_scaling"] = {key: value for key, value in rope.items() if key not in apart}
    return parts | older


def _config_dtype_name(manifest: Manifest, dtype: str | None, *, weights: Weights) -> str:
    """Returns the name of the dtype for config.json: `dtype`, or the widest floating dtype of the tensors."""
    if dtype is not None:
        return str(_DTYPES[dtype]).removeprefix("torch.")
    tensors = [tensor for _, tensor in select_model_tensors(manifest, weights).values()]
    floating = [one for one in tensors if one.torch_dtype.is_floating_point]
    return max(floating, key=lambda one: one.torch_dtype.itemsize).dtype if floating else "float32"


def find_end_tokens(run: Run | None) -> dict[int, str]:
    """Returns tokens that end documents or turns of the training data; values: "documents end", "turns end".

    Empty without a tokenizer. Logs if the tokenizer or its template cannot be read.
    """
    if run is None or (tokenizer := run.data.tokenizer) is None:
        return {}
    data, found = run.data, dict[int, str]()
    kinds = {one.records for one in data.sources or (data,) if one.source not in ("memmap", "python")}
    try:
        if kinds & {"text", "completion"}:
            ends = open_tokenizer_safely(tokenizer, eos_token=data.eos_token).tokens_after_document
            found[ends[-1]] = "documents end"
        if "messages" in kinds:  # no code beside the tokenizer is run: the checkpoint may be anybody's
            find = partial(ChatTemplate.find_trained_end_of_turn_token, tokenizer, data.chat_template)
            for turn in call_in_worker(find, what=f"the chat template of {tokenizer} cannot be used."):
                found.setdefault(turn, "turns end")
    except (DataError, MissingExtraError) as error:
        logger.warning("how the training data ends is not known, so eos_token_id is the model's: %s", error)
    return found


def add_end_tokens(config: dict[str, Any], beside: dict[str, bytes], *, ends: Mapping[int, str]) -> None:
    """Adds `ends` to the eos_token_id of config.json and of generation_config.json, if it exists; logs it."""
    files = {_CONFIG: config}
    with suppress(KeyError, ValueError):  # no such file, or one that is copied as it is
        generation = parse_json(beside[_GENERATION])
        files |= {_GENERATION: generation} if isinstance(generation, dict) else {}
    for name, settings in files.items():
        before = settings.get("eos_token_id")
        listed: list[int] = list(before) if isinstance(before, list) else [] if before is None else [before]
        added = [token for token in ends if token not in listed]
        if not added:
            continue
        listed += added
        settings["eos_token_id"] = listed if len(listed) > 1 else listed[0]
        if name == _GENERATION:
            beside[name] = json.dumps(settings, indent=2, ensure_ascii=False).encode() + b"\n"
        logger.warning(
            "%s: eos_token_id is %s, not %s: %s in training",
            name,
            settings["eos_token_id"],
            before,
            ", ".join(f"{ends[token]} with {token}" for token in added),
        )


def _list_files_to_copy(run: Run | None) -> dict[str, Path]:
    if run is None:
        return {}
    model: Path | None = None
    if isinstance(run.model, HuggingFaceModel):
        with suppress(SpecError):  # a model that is gone: the checkpoint has all that is needed
            model = locate_config_file(run.model.hf).parent
    tokenizer: Path | None = None
    if run.data.tokenizer is not None:
        path = find_tokenizer(run.data.tokenizer)
        tokenizer = path if path.is_dir() else path.parent
    elif run.data.token_makers == {"other program"}:  # tokens of the model's own tokenizer, not bytes
        tokenizer = model
    template = Path(os.path.expanduser(run.data.chat_template)) if run.data.chat_template else None
    # By another name, it could be any file of this user: the checkpoint may be anybody's.
    copied = template is not None and template.suffix == _TEMPLATE_SUFFIX and template.is_file()
    if template is not None and not copied:
        logger.warning("the chat template %s is gone or not a *.jinja, so it is not exported", template)
    if run.data.eos_token is not None:
        logger.warning(
            "documents ended with %s in training; the exported tokenizer has its own eos_token",
            run.data.eos_token,
        )
    wanted = [(tokenizer, name) for name in _TOKENIZER] + [(model, _GENERATION)]
    if tokenizer is not None and template is None:  # that one replaces them, too
        more = tokenizer.glob(f"{MORE_TEMPLATES}/*.jinja")
        wanted += [(tokenizer, str(path.relative_to(tokenizer))) for path in more]
    paths = {name: directory / name for directory, name in wanted if directory is not None}
    found = {name: path for name, path in paths.items() if path.is_file()}
    return found | ({_TEMPLATE: template} if template is not None and copied else {})

"""Checks that exported adapters compute what was trained, before a run starts and before an export.

Both checks use the model on the meta device, so they cost no memory of the model's size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import CheckpointError
from fullshard.models.adapters import (
    ADAPTER,
    has_transposed_weight,
    import_peft,
    iterate_adapted_layers,
    make_lora_config,
)
from fullshard.spec.settings.train_section import AdapterSection
from fullshard.spec.weight_map import Shape
from fullshard.weights.tensor_source import ADDED, BASE, LayerMerging

# Keys of peft's LoraConfig that select layers by name; the stand-in has one layer.
_BY_LAYER = ("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules")
_SIZE, _RANK = 16, 4  # rows and columns of a stand-in's weight, and rank of its adapter
_SAME = 1e-3  # relative to the largest output; the sum is computed in fp64


def adapter_merging(model: nn.Module, section: AdapterSection, *, base: nn.Module) -> dict[str, LayerMerging]:
    """Returns how the adapter of each layer of `model` is merged into `base`, by the layer's name.

    Raises CheckpointError unless the merged model would compute what `model` does.

    model: with adapters, on the meta device
    base: the same model without adapters, as it is loaded from the export

    Two conditions: every tensor that an export writes has a place in `base`, and no other module uses an
    adapted weight; and each kind of adapted layer, as a small stand-in with random adapters, computes
    W x + scale · B A x.
    """
    names = {name.replace(BASE, "."): one for name, one in model.state_dict().items() if ADDED not in name}
    there = {name: one.shape for name, one in base.state_dict().items()}
    absent = [name for name, one in names.items() if there.get(name) != one.shape]
    if absent:
        raise _merge_error(
            f"{len(absent)} tensors that the base model does not have in this shape: {', '.join(absent[:4])}"
        )
    adapted = dict(iterate_adapted_layers(model))
    _check_no_adapted_weight_is_shared(base, adapted)
    kinds: dict[tuple[type, ...], str] = {}
    for name, layer in adapted.items():
        kinds.setdefault((type(layer), type(layer.base_layer)), name)
    with torch.random.fork_rng(devices=()):
        for name in kinds.values():
            _check_layer_is_a_sum(name, adapted[name].base_layer, section=section)
    return {
        name: LayerMerging(layer.scaling[ADAPTER], _is_transposed(layer.base_layer))
        for name, layer in adapted.items()
    }


def _is_transposed(base: nn.Module) -> bool:
    return isinstance(base, nn.Embedding) or has_transposed_weight(base)


def _merge_error(got: str, why: str = "only W + scale · B A can be merged into W") -> CheckpointError:
    return CheckpointError(
        "the adapters cannot be merged.", got=got, why=why, fix="--format peft, which keeps them apart"
    )


def _check_no_adapted_weight_is_shared(base: nn.Module, adapted: Mapping[str, Any]) -> None:
    """Raises CheckpointError if another module uses a weight to which an adapter would be added."""
    sharing: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(parameter), []).append(name)
    for names in sharing.values():
        if len(names) > 1 and any(name.removesuffix(".weight") in adapted for name in names):
            raise _merge_error(
                f"an adapter of a weight that two modules share: {', '.join(names)}",
                why="the merged weight would also change the module that was trained without the adapter",
            )


def _check_layer_is_a_sum(name: str, base: nn.Module, *, section: AdapterSection) -> None:
    """Raises CheckpointError if a small layer of the class of `base` does not compute W x + scale · B A x."""
    is_embedding = type(base) is nn.Embedding
    if not is_embedding and type(base) is not nn.Linear and not has_transposed_weight(base):
        raise _merge_error(f"{name}, whose class is {type(base).__name__}")
    make_layer: Any = type(base)
    small: nn.Module = make_layer(_SIZE, _SIZE).double()
    inputs = torch.arange(_SIZE) if is_embedding else torch.randn(_SIZE, _SIZE).double()
    options = {key: value for key, value in section.options.items() if key not in _BY_LAYER}
    plain = section.model_copy(update={"rank": _RANK, "dropout": 0.0, "options": options})
    config = make_lora_config(plain, targets=["layer"], turned=has_transposed_weight(base))
    holder = nn.ModuleDict({"layer": small})
    with torch.no_grad():
        before = small(inputs)
        try:
            import_peft().inject_adapter_in_model(config, holder, ADAPTER)
        except (ValueError, TypeError, RuntimeError) as error:  # also NotImplementedError
            raise _merge_error(f"{name}: {str(error).splitlines()[0]}") from error
        layer: Any = holder["layer"].double().eval()
        factors = {part: one for part, one in layer.named_parameters() if "base_layer" not in part}
        for parameter in factors.values():
            nn.init.normal_(parameter)
        product = _multiply_factors(factors)
        if product is not None:
            added = product.T[inputs] if is_embedding else inputs @ product.T
            expected = before + layer.scaling[ADAPTER] * added
            if (layer(inputs) - expected).abs().max() <= _SAME * expected.abs().max():
                return
    raise _merge_error(f"adapter.options = {section.options}, with which {name} does not compute this sum")


def _multiply_factors(factors: Mapping[str, Tensor]) -> Tensor | None:
    """Returns B A of a layer's only two factors; None for other parameters."""
    for names in (
        [f"lora_{one}.{ADAPTER}.weight" for one in "AB"],
        [f"lora_embedding_{one}.{ADAPTER}" for one in "AB"],
    ):
        if set(names) == set(factors):
            return factors[names[1]] @ factors[names[0]]
    return None


def check_peft_loads(base: nn.Module, config: Any, *, tensors: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless peft puts every exported tensor into `base`, which is on the meta device.

    config: peft's LoraConfig, as exported; tensors: shape of each tensor by its name in the file
    """
    peft = import_peft()
    values = {name: torch.empty(shape, device="meta") for name, shape in tensors.items()}
    try:
        model = peft.PeftModel(base, config, low_cpu_mem_usage=True)
        loaded = peft.set_peft_model_state_dict(model, values)
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        lacking = [name for name in loaded.missing_keys if ADDED in name]
        problem = ", ".join([*loaded.unexpected_keys, *lacking][:4])
    if problem:
        raise CheckpointError(
            "the adapters cannot be written for peft.",
            got=problem,
            why="PeftModel.from_pretrained would load something else than the trained model, or nothing",
            fix="--format hf, which merges them, or --format safetensors",
        )

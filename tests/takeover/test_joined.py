"""Moments follow the same map as weights where the model joins, stacks or splits tensors of a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import CheckpointError
from fullshard.takeover.formats import open_foreign_checkpoint
from fullshard.takeover.names import match_names

SIZES: dict[str, Any] = {
    **{"vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16},
}
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 3},
    "Qwen3MoeForCausalLM": {"num_experts": 3, "moe_intermediate_size": 6, "num_experts_per_tok": 2},
    "NomicBertForMaskedLM": {"num_key_value_heads": 2},
}
"""The first two stack a tensor of each expert, and the last splits queries, keys and values."""
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def model_and_source(
    name: str, path: Path, **updates: float
) -> tuple[nn.Module, dict[str, dict[str, Tensor]]]:
    """Returns a model, and the values of each kind that the file has in the names of old transformers.

    updates: {part of a name in the file: number of its updates}, 3 for others
    """
    transformers = pytest.importorskip("transformers", minversion="5")
    core = pytest.importorskip("transformers.core_model_loading")
    torch.manual_seed(0)
    made = getattr(transformers, name, None) or pytest.skip(f"transformers without {name}")
    model = made(made.config_class(**SIZES | MODELS[name]))
    parameters = dict(model.named_parameters())
    values = {kind: {n: torch.rand_like(one) for n, one in parameters.items()} for kind in KINDS}
    file = {kind: core.revert_weight_conversion(model, dict(some)) for kind, some in values.items()}
    steps = {n: next((u for part, u in updates.items() if part in n), 3) for n in file["weight"]}
    state = {n: {"step": steps[n], **{k: file[k][n].clone() for k in KINDS[1:]}} for n in file["weight"]}
    optimizer = {"state": state, "param_groups": [{"params": [*state]}]}
    torch.save({"model": {n: one.clone() for n, one in file["weight"].items()}, "optimizer": optimizer}, path)
    assert len(file["weight"]) != len(parameters)
    return model, values


def read(named: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: named[name].read() for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_moments_follow_the_map_of_weights_without_a_difference(name: str, tmp_path: Path) -> None:
    model, values = model_and_source(name, tmp_path / "one.pt")
    found = match_names(open_foreign_checkpoint(tmp_path / "one.pt"), model)
    assert (found.left_over, found.left_over_state) == ((), ())
    for kind in KINDS:
        own = {n: one if kind == "weight" else found.moments[n][kind] for n, one in found.weights.items()}
        for n, tensor in read(own, values[kind]).items():
            assert torch.equal(tensor, values[kind][n]), (kind, n)
    assert found.updates == dict.fromkeys(values["weight"], 3)
    (group,) = found.groups
    assert {*group.names} == {*values["weight"]}


def test_stacked_experts_with_other_numbers_of_updates_are_refused_by_name(tmp_path: Path) -> None:
    model, _ = model_and_source("Qwen3MoeForCausalLM", tmp_path / "one.pt", **{"experts.1.": 2})
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj were updated in different.*\n.*experts\.1\..*: 2"
    ):
        match_names(open_foreign_checkpoint(tmp_path / "one.pt"), model)


def test_two_tensors_of_a_file_that_transformers_gives_one_name_are_refused(tmp_path: Path) -> None:
    model, _ = model_and_source("Qwen3MoeForCausalLM", tmp_path / "one.pt")
    content = torch.load(tmp_path / "one.pt")
    content["model"]["norm.weight"] = content["model"]["model.norm.weight"] + 1
    torch.save(content, tmp_path / "one.pt")
    with pytest.raises(CheckpointError, match=r"two tensors would be model\.norm\.weight"):
        match_names(open_foreign_checkpoint(tmp_path / "one.pt"), model)

"""The parameter groups of an optimizer: weight decay by default, and [[optimizer.groups]]."""

import difflib
import logging
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import SpecError
from fullshard.parallel.hidden_matrices import find_fused_matrices, find_hidden_matrices
from fullshard.quantities import count_text, format_count, join_names
from fullshard.spec.settings.train_section import OptimizerGroup, OptimizerSection
from fullshard.training.learning_rates import FACTOR
from fullshard.training.whole_matrices import KIND

logger = logging.getLogger("fullshard")
_REST = OptimizerGroup(match=("*",))
_TITLES = {"muon": "Muon", "soap": "SOAP"}


@dataclass(frozen=True)
class MatchedGroup:
    """A group of [[optimizer.groups]], or the rest, with its trained parameters by name.

    matrices: names of those that Muon or SOAP updates
    """

    settings: OptimizerGroup
    parameters: Mapping[str, nn.Parameter]
    matrices: frozenset[str] = frozenset()

    @property
    def is_rest(self) -> bool:
        return self.settings is _REST


def match_groups(model: nn.Module, section: OptimizerSection) -> list[MatchedGroup]:
    """Divides the trained parameters among [[optimizer.groups]], in their order; the last group is the rest.

    A parameter belongs to the first group of which a pattern matches its name, that of
    `model.named_parameters()` and of checkpoints. Raises SpecError for a pattern that matches no trained
    parameter, or only those of earlier groups, and for parameters that Muon or SOAP cannot update.

    >>> [(group.settings.match, len(group.parameters)) for group in match_groups(model, plan.run.optimizer)]
    [(('*norm*',), 9), (('*',), 30)]
    """
    left = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = find_hidden_matrices(model).keys() if section.matrix_kind else set[str]()
    found = list[MatchedGroup]()
    for settings in section.groups:
        own = {name: parameter for name, parameter in left.items() if settings.matches(name)}
        for pattern in settings.match:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise _unmatched_pattern_error(pattern, model)
        names = _matrix_names(settings, own, matrices=matrices, kind=section.matrix_kind)
        found.append(MatchedGroup(settings, own, matrices=names))
        left = {name: parameter for name, parameter in left.items() if name not in own}
    found += [MatchedGroup(_REST, left, matrices=frozenset(left.keys() & matrices))] if left else []
    if (kind := section.matrix_kind) and not any(group.matrices for group in found):
        raise SpecError(
            f"{_TITLES[kind]} has no matrix to update.",
            got=f'optimizer.name = "{kind}", {type(model).__name__}',
            why="it updates weights of linear modules and experts in repeated blocks, unless a group says so",
            fix=f'[[optimizer.groups]] with kind = "{kind}", or optimizer.name = "adamw"',
        )
    return found


def _matrix_names(
    settings: OptimizerGroup, own: Mapping[str, nn.Parameter], *, matrices: Set[str], kind: str | None
) -> frozenset[str]:
    """Returns the names in `own`, the group's parameters, of matrices. `matrices`: those by default."""
    if settings.kind in (None, "adamw"):
        names = frozenset(own.keys() & matrices) if settings.kind is None else frozenset[str]()
    elif others := [name for name, one in own.items() if one.ndim != 2 and name not in matrices]:
        shape = list(own[others[0]].shape)
        raise SpecError(
            f"{_TITLES[settings.kind]} updates matrices and stacks of experts alone.",
            got=f'kind = "{settings.kind}" for {join_names(others, most=3)}, of shape {shape}',
            fix="a pattern that matches matrices alone",
        )
    else:
        names = frozenset(own)
    if kind == "muon" and settings.betas is not None and len(names) == len(own):
        raise SpecError(
            "a group of [[optimizer.groups]] has betas, which Muon has not.",
            got=f"betas = {list(settings.betas)} for {join_names(list(settings.match))}",
            fix='the group without betas, or with kind = "adamw"',
        )
    return names


def make_parameter_groups(model: nn.Module, section: OptimizerSection) -> list[dict[str, Any]]:
    """Returns torch's parameter groups of all trained parameters of `model`.

    A group of [[optimizer.groups]] may become several: one for each weight decay, placement and dtype. The
    rest comes first, because the rate of the first group is the one that a run prints.
    """
    excluded = _names_model_excludes_from_decay(model)
    if marked := [name for name, parameter in model.named_parameters() if hasattr(parameter, "_optim")]:
        logger.warning(
            "the attribute _optim of %s is not used: for other learning rates, [[optimizer.groups]]",
            join_names(marked, most=3),
        )
    groups = dict[Hashable, dict[str, Any]]()
    matched_groups = sorted(match_groups(model, section), key=lambda one: not one.is_rest)
    for number, matched in enumerate(matched_groups):
        settings = matched.settings
        own: dict[str, Any] = {} if settings.betas is None else {"betas": settings.betas}
        if settings.lr_factor != 1:
            own |= {"lr": section.learning_rate * settings.lr_factor, FACTOR: settings.lr_factor}
        for name, parameter in matched.parameters.items():
            decay = settings.weight_decay
            if decay is None:
                decays = name not in excluded and _has_decay_by_default(model, name, parameter=parameter)
                decay = section.weight_decay if decays else 0.0
            placed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            kind = section.matrix_kind if name in matched.matrices else "adamw"
            key = (number, decay, placed, parameter.dtype, kind)
            of_kind = {KIND: kind} if section.matrix_kind else {}
            group = groups.setdefault(key, {"params": [], "weight_decay": decay} | own | of_kind)
            group["params"].append(parameter)
    return list(groups.values())


def group_lines(model: nn.Module, section: OptimizerSection) -> list[str]:
    """Returns a line of text for each of [[optimizer.groups]] and for the rest; none without such groups.

    With Muon or SOAP, its parameters and those of AdamW have a line each.
    """
    if not section.groups and not section.matrix_kind:
        return []
    return [line for one in match_groups(model, section) for line in _lines_of_group(one, section)]


def _lines_of_group(group: MatchedGroup, section: OptimizerSection) -> list[str]:
    title, rest = (_TITLES[section.matrix_kind], "AdamW") if section.matrix_kind else ("", "")
    by_kind: dict[str, list[Tensor]] = {title: [], rest: []}
    for name, parameter in group.parameters.items():
        by_kind[title if name in group.matrices else rest].append(parameter)
    lines = [_group_line(group, section, parameters=own, kind=kind) for kind, own in by_kind.items() if own]
    if fused := find_fused_matrices(sorted(group.matrices)):
        lines.append(f"{title} takes fused matrices as one: {join_names(fused, most=3)}")
    return lines


def _group_line(
    group: MatchedGroup, section: OptimizerSection, *, parameters: Sequence[Tensor], kind: str
) -> str:
    settings = group.settings
    decay = "by default" if settings.weight_decay is None else f"{settings.weight_decay:g}"
    parts = [
        "all others" if group.is_rest else join_names(list(settings.match)),
        *([kind] if kind else []),
        f"{format_count(sum(map(Tensor.numel, parameters)))} in {count_text(len(parameters), 'tensor')}",
        f"rate {section.learning_rate * settings.lr_factor:.4g}",
        f"weight decay {decay}",
        *([f"betas {list(settings.betas)}"] if settings.betas and kind != "Muon" else []),
    ]
    return "group " + ", ".join(parts)


def _unmatched_pattern_error(pattern: str, model: nn.Module) -> SpecError:
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    names = list(is_trained)
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if any(is_trained[name] for name in matched):
        why = "earlier groups have its parameters: the first that matches counts"
        fix = "another order of groups"
    elif matched:
        why, fix = f"it matches only frozen parameters: {join_names(matched, most=3)}", None
    else:
        trained = [name for name in names if is_trained[name]]
        why, fix = None, join_names(_similar_names(pattern, names) or trained, most=3)
    return SpecError(
        "a pattern of [[optimizer.groups]] matches no parameter.", got=repr(pattern), why=why, fix=fix
    )


def _similar_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Returns the names with the most parts, between dots, that are similar to a part of the pattern."""
    parts = {part.lower() for name in names for part in name.split(".")}
    words = [word for word in re.split(r"[.*?\[\]]", pattern.lower()) if word]
    near = {one for word in words for one in difflib.get_close_matches(word, parts, n=1, cutoff=0.6)}
    counts = {name: len(near & set(name.lower().split("."))) for name in names}
    most = max(counts.values())
    return [name for name, count in counts.items() if count == most > 0]


def _names_model_excludes_from_decay(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that the model marks: see `build_optimizer`."""
    names = {name for name, one in model.named_parameters() if getattr(one, "_no_weight_decay", False)}
    for path, module in model.named_modules():
        method: Any = getattr(module, "no_weight_decay", None)
        if callable(method):
            names |= {f"{path}.{name}" if path else name for name in cast(Iterable[str], method())}
    return names


def _has_decay_by_default(model: nn.Module, name: str, *, parameter: nn.Parameter) -> bool:
    module_name, _, own = name.rpartition(".")
    is_norm = "norm" in type(model.get_submodule(module_name)).__name__.lower() or own.endswith("norm")
    return parameter.ndim >= 2 and not is_norm and own != "bias" and not own.endswith("_bias")

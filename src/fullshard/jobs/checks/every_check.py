"""Lists all checks in one tuple, and runs them."""

from collections.abc import Iterator
from typing import Any

from fullshard.distributed.agreement import ErrorCapture
from fullshard.jobs.checks.before_run import CHECKS_WITHOUT_TORCH, Check
from fullshard.jobs.checks.data import (
    check_duplicates,
    check_labels,
    check_order,
    check_vocabulary_range,
)
from fullshard.jobs.checks.model import (
    check_first_loss,
    check_gradients,
    check_graphs,
    check_initial_values,
    check_microbatches,
    check_row_independence,
    check_sees_future,
    check_tied_parameters,
)
from fullshard.jobs.checks.ranks import (
    check_connections,
    check_links,
    check_same_settings,
    check_sharded_step,
    check_state_dtypes,
)
from fullshard.spec.records.finding import Finding

CHECKS = (
    *CHECKS_WITHOUT_TORCH,
    Check("first_loss", "model", check_first_loss, "google-research/t5x#1093"),
    Check("sees_future", "model", check_sees_future, "huggingface/transformers#48745"),
    Check("row_independence", "model", check_row_independence, "huggingface/transformers#47394"),
    Check("gradients", "model", check_gradients, "pytorch/pytorch#65195"),
    Check("tied_parameters", "model", check_tied_parameters, "NVIDIA-NeMo/Automodel#2213"),
    Check("microbatches", "model", check_microbatches, "huggingface/blog#2414"),
    Check("initial_values", "model", check_initial_values, "fla-org/flame#9"),
    Check("graphs", "model", check_graphs, "NVIDIA/TransformerEngine#705"),
    Check("vocabulary_range", "data", check_vocabulary_range, "huggingface/transformers#24698"),
    Check("labels", "data", check_labels, "huggingface/trl#6668"),
    Check("duplicates", "data", check_duplicates, "k2-fsa/icefall#1616"),
    Check("order", "data", check_order, "modelscope/ms-swift#10050"),
    Check("connections", "ranks", check_connections, "NVIDIA/nccl-tests#162"),
    Check("links", "ranks", check_links, "NVIDIA/nccl#428"),
    Check("same_settings", "ranks", check_same_settings, "NVIDIA/nccl#286"),
    Check("sharded_step", "ranks", check_sharded_step, "NovaSky-AI/SkyRL#1709"),
    Check("state_dtypes", "ranks", check_state_dtypes, "areal-project/AReaL#1292"),
)
GROUPS = ("settings", "machine", "storage", "model", "data", "ranks")


def iterate_findings(part: Any, *, group: str) -> Iterator[Finding]:
    """Makes the checks of a group, and yields what each finds.

    part: what these checks read: a RunContext, ModelTrial, DataTrial or RankFacts; or the Finding that says
        why it is missing, which the first check then reports, and the others are skipped
    """
    for check in CHECKS:
        if check.group != group:
            continue
        yield check.name_finding(part if isinstance(part, Finding) else _find(check, part))
        if isinstance(part, Finding) and part.is_problem:
            part = Finding.skipped(f"the {group} could not be checked")


def _find(check: Check, part: Any) -> Finding:
    """Returns the finding of a check. An exception, from a model or data of the user, is a failure."""
    attempt = ErrorCapture()
    with attempt:
        return check.find(part)
    error = attempt.error
    lines = str(error).strip().splitlines() or [""]
    return Finding.failure(
        f"{type(error).__name__}: {lines[0][:300]}",
        why="the check computes what a step of training computes",
        fix=getattr(error, "fix", None),
    )

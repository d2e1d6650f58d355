"""Lists the checks of a run that one process makes in one table, and runs them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fullshard.distributed.agreement import ErrorCapture
from fullshard.jobs.checks import data, model
from fullshard.jobs.checks.machine import CHECKS_WITHOUT_TORCH, name_finding
from fullshard.spec.records.finding import Finding

# Name of a group -> its checks, each with a public report of a fault that it finds.
CHECKS: Mapping[str, Sequence[Callable[[Any], Finding]]] = {
    **CHECKS_WITHOUT_TORCH,
    "model": (
        model.check_first_loss,  # google-research/t5x#1093
        model.check_sees_future,  # huggingface/transformers#48745
        model.check_row_independence,  # huggingface/transformers#47394
        model.check_gradients,  # pytorch/pytorch#65195
        model.check_microbatches,  # huggingface/blog#2414
        model.check_initial_values,  # fla-org/flame#9
    ),
    "data": (
        data.check_evaluations,  # tatsu-lab/stanford_alpaca#42
        data.check_vocabulary_range,  # huggingface/transformers#24698
        data.check_labels,  # huggingface/trl#6668
        data.check_duplicates,  # k2-fsa/icefall#1616
        data.check_order,  # modelscope/ms-swift#10050
    ),
}


def iterate_findings(part: Any, *, group: str) -> Iterator[Finding]:
    """Runs the checks of a group, and yields the finding of each.

    part: what these checks read: a RunContext, ModelTrial or DataTrial; or the Finding that says why it is
        missing, which the first check then reports, and the others are skipped
    """
    for check in CHECKS[group]:
        yield name_finding(part if isinstance(part, Finding) else _run_check(check, part), check, group=group)
        if isinstance(part, Finding) and part.is_problem:
            part = Finding.skipped(f"the {group} could not be checked")


def _run_check(check: Callable[[Any], Finding], part: Any) -> Finding:
    """Returns the finding of a check. An exception, from a model or data of the user, is a failure."""
    attempt = ErrorCapture()
    with attempt:
        return check(part)
    error = attempt.error
    lines = str(error).strip().splitlines() or [""]
    return Finding.failure(
        f"{type(error).__name__}: {lines[0][:300]}",
        why="the check computes what a step of training computes",
        fix=getattr(error, "fix", None),
    )

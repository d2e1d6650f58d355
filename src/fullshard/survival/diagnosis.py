"""Diagnosis of a hang, from the ranks' reports: names the rank that the others wait for."""

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.errors import TrainError
from fullshard.quantities import leave_out_middle, rank_list_text
from fullshard.survival.phase import Heartbeat, RunPhase
from fullshard.system.process import pid_namespace, read_stat_fields_after_comm


@dataclass(frozen=True)
class RankReport:
    """The report of a rank, which the watchdogs request when a rank hangs.

    seen: the rank's position now
    waits: whether the rank waits for other ranks
    place: innermost line of Python outside libraries
    collective: `RecordedCollectives.last`
    wait: name of the collective for which the rank waits, as in a trace, or "" if it is not known
    unit: name of the unit that the rank gathered or reduced last, or "" if it is not known
    unfinished, started: see `RecordedCollectives`
    """

    seen: Heartbeat
    waits: bool
    place: str
    collective: str
    wait: str = ""
    unit: str = ""
    unfinished: Mapping[str, str] = field(default_factory=dict[str, str])
    started: Sequence[str] = ()


@dataclass(frozen=True)
class UnresponsiveRank:
    """A rank that sent no report: its last heartbeat, if any, and its `process_state_letter`."""

    last: Heartbeat | None
    state: str | None


def host_and_namespace_id() -> str:
    """Returns host name and pid namespace, equal for processes that see each other under /proc."""
    return f"{socket.gethostname()} {pid_namespace()}".strip()


def process_state_letter(seen: Heartbeat) -> str | None:
    """Returns the state letter of a rank's process (man proc_pid_stat); "" if it is gone, None if unknown."""
    if sys.platform != "linux" or seen.host != host_and_namespace_id():
        return None
    return next(iter(read_stat_fields_after_comm(seen.process)), "")


@dataclass(frozen=True)
class Diagnosis:
    """The error that ends a hanging run, and the ranks to show stacks of: a few culprits, a few others."""

    error: TrainError
    shown: Sequence[int]


def diagnose_hang(
    reports: Mapping[int, RankReport], silent: Mapping[int, UnresponsiveRank], *, now: float
) -> Diagnosis:
    """Names the ranks that the others wait for. Every rank is in either `reports` or `silent`.

    The culprits are the silent ranks, if any; else the ranks that do not wait while others do; else those of
    `_find_odd_collective`; else, if hosts wait in collectives, the smallest group in one place, of two such
    the one further ahead. If all wait in one place, or none waits, no rank is named.

    now: seconds since the epoch
    """
    groups = _group_ranks_by_position(reports)
    if silent:
        culprits, what = sorted(silent), _unresponsive_ranks_text(silent)
    else:
        culprits, what = _find_culprits(reports, groups)
    lines = [f"rank {rank}: {_last_heartbeat_text(one, now=now)}" for rank, one in sorted(silent.items())]
    lines += [f"{rank_list_text(group)}: {_report_summary_text(reports[group[0]])}" for group in groups]
    error = TrainError(
        what,
        got="\n       ".join(leave_out_middle(lines)),
        why="nothing moves, so the watchdog ends the run (fault_tolerance.watchdog_timeout_seconds)",
        fix="see its message; then the same command with --resume, from the newest checkpoint",
    )
    shown = [rank for rank in culprits if rank in reports][:_SHOWN]
    shown += [group[0] for group in groups if group[0] not in set(culprits)][:_SHOWN]
    return Diagnosis(error, shown)


def diagnose_lost_store(rank: int, report: RankReport) -> Diagnosis:
    """Returns the diagnosis of a hanging `rank` that cannot reach the other ranks' store."""
    error = TrainError(
        f"rank {rank} hangs and can reach no other: {_phase_and_place(report)}.",
        got="the store in which the ranks meet does not answer",
        why="its host, mostly that of rank 0, has gone, or the link to it is cut",
        fix="see the messages on the other hosts; then fullshard train --resume",
    )
    return Diagnosis(error, [rank])


# Number of ranks whose stacks are shown, even in a run of thousands.
_SHOWN = 4


def _group_ranks_by_position(reports: Mapping[int, RankReport]) -> list[list[int]]:
    """Returns the ranks, grouped by equal position and collective, smallest groups first.

    Hosts run ahead of their devices: ranks whose devices wait alike are in one group, wherever the hosts are.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, one in sorted(reports.items()):
        key = (one.seen.step, one.seen.phase, one.waits, one.wait, one.unit, one.place, one.collective)
        on_device = (one.collective, *sorted(one.started))
        groups.setdefault(on_device if one.unfinished else key, []).append(rank)
    return sorted(groups.values(), key=len)


def _find_culprits(reports: Mapping[int, RankReport], groups: Sequence[list[int]]) -> tuple[list[int], str]:
    """Returns the culprits and a sentence that names them, if every rank has reported."""
    waiting = [rank for rank, one in sorted(reports.items()) if one.waits]
    busy = [rank for rank, one in sorted(reports.items()) if not one.waits]
    if waiting and busy:
        does = "does" if len(busy) == 1 else "do"
        what = f"{rank_list_text(busy)} {does} not come to the collective that {_who_waits_text(waiting)} in"
        return busy, f"{what}: {_phase_and_place(reports[busy[0]])}."
    if waiting and (found := _find_odd_collective(reports)) is not None:
        return found
    if not waiting or len(groups) == 1 or all(one.unfinished for one in reports.values()):
        does = "wait in the same collective, which does not end"
        does = does if waiting else "do not come to any collective"
        return [], f"all ranks {does}: {rank_list_text(groups[0])} {_phase_and_place(reports[groups[0][0]])}."
    odd = groups[0]
    if len(groups[0]) == len(groups[1]):
        seen = [reports[group[0]].seen for group in groups[:2]]
        places = [(one.step, list(RunPhase).index(RunPhase(one.phase))) for one in seen]
        odd = groups[places.index(max(places))]
    rest = sorted(reports.keys() - odd)
    here, there = reports[odd[0]], reports[rest[0]]
    return odd, (
        f"{rank_list_text(odd)} left out a collective that {_who_waits_text(rest)} in, or made one more: "
        f"in {_phase_text(here.seen)}, {_place_text(here)}; "
        f"not in {_phase_text(there.seen)}, {_place_text(there)}."
    )


def _find_odd_collective(reports: Mapping[int, RankReport]) -> tuple[list[int], str] | None:
    """Returns the culprits by the oldest unfinished collective of each device; None if these are alike.

    The ranks of one process group are compared. If they differ, the fewest are in another collective than the
    rest. If they are alike and run on some devices, the others have not come to it.
    """
    ranks_in: dict[str, dict[str, list[int]]] = {}  # group -> its oldest collective -> ranks
    for rank, one in sorted(reports.items()):
        for group, text in one.unfinished.items():
            ranks_in.setdefault(group, {}).setdefault(text, []).append(rank)
    for group, by_text in sorted(ranks_in.items()):
        odd, *others = sorted(by_text.values(), key=len)
        rest = sorted(rank for ranks in others for rank in ranks)
        if rest:
            texts = [reports[one[0]].unfinished[group] for one in (odd, rest)]
            are = "is" if len(odd) == 1 else "are"
            return odd, (
                f"{rank_list_text(odd)} {are} in another collective than {rank_list_text(rest)}: "
                f"{texts[0]}; not {texts[1]}."
            )
        late = [rank for rank in odd if group not in reports[rank].started]
        if late and len(late) < len(odd):
            here = sorted({*odd} - {*late})
            return late, (
                f"{rank_list_text(late)} launched the collective that {_who_waits_text(here)} in, but "
                f"earlier work on the device does not end: {_phase_and_place(reports[late[0]])}."
            )
    return None


def _place_text(report: RankReport) -> str:
    return f"unit {report.unit}, {report.place}" if report.unit else report.place


def _who_waits_text(ranks: Sequence[int]) -> str:
    return f"{rank_list_text(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _phase_text(seen: Heartbeat) -> str:
    """Returns the phase and its step, for example `forward of step 4` or `saving after step 3`."""
    in_step = seen.phase in _OF_A_STEP
    return f"{seen.phase} of step {seen.step + 1}" if in_step else f"{seen.phase} after step {seen.step}"


_OF_A_STEP = (RunPhase.DATA, RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.REDUCE, RunPhase.OPTIMIZER)


def _phase_and_place(report: RankReport, waits: str = "") -> str:
    seen = report.seen
    return f"in {_phase_text(seen)} for {seen.unmoved_seconds:.0f} s{waits}, {_place_text(report)}"


def _report_summary_text(report: RankReport) -> str:
    state = ", not ended on the device" if report.unfinished else ""
    last = f"; last collective: {report.collective}{state}" if report.collective else ""
    waits = f", {report.wait}" if report.wait else ", waits in a collective" if report.waits else ""
    return _phase_and_place(report, waits) + last


def _unresponsive_ranks_text(silent: Mapping[int, UnresponsiveRank]) -> str:
    first = min(silent)
    others = f" (and {rank_list_text(sorted(silent)[1:])})" if len(silent) > 1 else ""
    last = silent[first].last
    where = "no heartbeat yet" if last is None else f"last heartbeat in {_phase_text(last)}"
    return f"rank {first}{others} does not answer, {where}: {_STATES.get(silent[first].state, _RUNS)}."


_RUNS = "its process runs, but no Python in it does: native code holds the interpreter, or spins"
_STOPPED = "paused process (by SIGSTOP or a debugger; kill -CONT resumes it)"
_GONE = "its process is gone"
# By `process_state_letter`; in any other state, the process runs.
_STATES = {
    None: "its host or the link to it is gone, or its process is",
    "T": _STOPPED,
    "t": _STOPPED,
    "D": "its process waits in the kernel, for a disk, a network file system or a driver",
    "": _GONE,
    "Z": _GONE,
    "X": _GONE,
}


def _last_heartbeat_text(silent: UnresponsiveRank, *, now: float) -> str:
    last = silent.last
    if last is None:
        return "no heartbeat yet"
    place = f"{_phase_text(last)}, process {last.process} on {last.host}"
    return f"last heartbeat {now - last.at:.0f} s ago in {place}"

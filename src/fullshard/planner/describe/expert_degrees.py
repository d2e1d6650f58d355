"""Derives the recordings of a mixture for any number of ranks that divide its experts, from those of three.

[Note: expert degrees]
If E ranks divide the experts, each has 1/E of them, and exchanges counts with E ranks; everything else is the
same. So each number in a recording is a + b / E + c E, and recordings for three numbers of ranks define it
for all. This does not hold if the number of operations depends on E: for experts that are computed in turn.
Nor does it hold for packed experts, which are dequantised in chunks of a fixed size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from fullshard.planner.describe.extrapolation import has_same_structure
from fullshard.planner.describe.interpolation import combine, find_weights
from fullshard.planner.describe.recordings import SettingRecording
from fullshard.spec.model import UntraceableSettings


class RunRecording(NamedTuple):
    """Recordings of a run under all its settings, and the settings that cannot be traced."""

    settings: Sequence[SettingRecording]
    untraced: Sequence[UntraceableSettings]
    loss_chunk: int


def derive_recording(known: Mapping[int, RunRecording], degree: int) -> RunRecording | None:
    """Returns the recording for `degree` ranks that divide experts; None if it does not follow from `known`.

    known: recordings of the same run by the number of ranks, over 1; the first three count
    """
    degrees, runs = list(known)[:3], list(known.values())[:3]
    if len(degrees) < 3 or len({tuple(one.microbatch for one in run.settings) for run in runs}) > 1:
        return None
    *terms, target = ((1, Fraction(1, one), one) for one in (*degrees, degree))
    weights = find_weights(terms, target)
    found: list[SettingRecording] = []
    for row in zip(*(run.settings for run in runs), strict=True):
        lows, highs = [one.low for one in row], [one.high for one in row]
        for sizes in (lows, highs):
            if not all(has_same_structure(one.all_phases, sizes[0].all_phases) for one in sizes):
                return None
        try:
            found.append(replace(row[0], low=combine(lows, weights), high=combine(highs, weights)))
        except ValueError:  # they do not follow
            return None
    return runs[0]._replace(settings=found)

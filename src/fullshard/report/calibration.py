"""Result of `fullshard calibrate` as a short table."""

from collections.abc import Iterator

from fullshard.quantities import format_bytes, format_count, format_seconds
from fullshard.spec.calibration import Calibration
from fullshard.spec.hardware import Curve, Hardware, Link, Rates


def calibration_rows(calibration: Calibration) -> Iterator[tuple[str, str]]:
    """Yields (label, text) lines: the best point of each rate curve, other rates, and the fit errors."""
    hardware, rates = calibration.hardware, calibration.hardware.rates
    yield "hardware", _hardware_text(hardware)
    yield "measured in", f"{format_seconds(calibration.took_seconds)}, all ranks at once; rates per rank:"
    yield "other programs", f"{hardware.calibration_load or 0.0:.0%} of the processors in this time"
    yield from _compute_rate_rows(rates)
    yield "fused AdamW", _best_rate_text(rates.optimizer, amount="B")
    if rates.rounding is not None:
        yield "  with rounding", f"{format_count(rates.rounding[-1].rate)} elements/s"
    yield "launch", f"{rates.launch_seconds * 1e6:.1f} us an operation"
    for axis, link in (("within", hardware.within), ("across", hardware.across)):
        if link is not None and any(name.startswith(f"{axis}.") for name in calibration.fit_errors):
            yield from _collective_rate_rows(axis, link, calibration=calibration)
    if hardware.host_bytes_per_second is not None:
        yield "host copies", f"{format_count(hardware.host_bytes_per_second)}B/s"
    yield "AdamW on the host", f"{format_count(hardware.adam_per_second)} parameters/s per rank"
    if hardware.disk_bytes_per_second is not None:
        yield "drive, reading and writing", f"{format_count(hardware.disk_bytes_per_second)}B/s"
    yield "process", f"{format_bytes(hardware.context_bytes)} beside the tensors"


def _hardware_text(hardware: Hardware) -> str:
    ranks = f"{hardware.ranks_per_node} rank{'s' if hardware.ranks_per_node > 1 else ''}"
    nodes = f" on each of {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"{hardware.name}, {ranks}{nodes}"


def _compute_rate_rows(rates: Rates) -> Iterator[tuple[str, str]]:
    for dtype, curve in rates.matmul.items():
        yield f"matmul {dtype}", _best_rate_text(curve, amount="FLOP")
    yield "  odd sizes", f"{rates.unaligned_matmul:.0%} of that rate, in half precision"
    for label, curves in (("attention", rates.attention), ("  backward", rates.attention_backward)):
        for dtype, curve in curves.items():
            yield f"{label} {dtype}", _best_rate_text(curve, amount="FLOP")
    yield "memory", _best_rate_text(rates.memory, amount="B")
    yield "  bf16", f"{rates.half_memory:.0%} of that rate"


def _best_rate_text(curve: Curve, *, amount: str) -> str:
    best = max(curve, key=lambda point: point.rate)
    text = f"{format_count(best.rate)}{amount}/s at {format_count(best.size)}{amount} a launch"
    if best is not curve[-1]:
        text += f", {format_count(curve[-1].rate)}{amount}/s at {format_count(curve[-1].size)}{amount}"
    return text


def _collective_rate_rows(axis: str, link: Link, *, calibration: Calibration) -> Iterator[tuple[str, str]]:
    ranks = calibration.hardware.ranks_per_node if axis == "within" else calibration.hardware.nodes
    for kind, rate in link.known_rates.items():
        latency = format_seconds(rate.base_seconds + rate.hop_seconds * (ranks - 1))
        error = calibration.fit_errors[f"{axis}.{kind}"]
        line = f"{format_count(rate.bytes_per_second)}B/s after {latency}"
        yield f"{kind.replace('_', '-')} {axis}", f"{line}; this line is off by at most {100 * error:.0f} %"

"""Hardware in round figures, none of them anyone's."""

from fullshard.spec.machine.hardware import Chip, CollectiveRate, Curve, Hardware, Link, RatePoint, Rates


def hardware_of(nodes: int = 1, ranks_per_node: int = 8, *, gib: float = 80, scale: float = 1.0) -> Hardware:
    """GPUs of `gib` GiB; `scale`: of the bandwidth of both links."""
    flat: Curve = (RatePoint(1e6, 1e13), RatePoint(1e10, 3e14), RatePoint(1e13, 6e14))
    curves = {"bf16": flat, "fp32": (RatePoint(1e6, 1e12), RatePoint(1e11, 5e13))}
    return Hardware(
        name="some GPUs",
        device="cuda",
        chip=Chip(
            name="some GPU",
            device_names=("some gpu",),
            memory_bytes=int(gib * 1024**3),
            memory_bytes_per_second=3e12,
            flops_per_second={"bf16": 1e15, "fp32": 6e13},
            source="none",
        ),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        rates=Rates(
            matmul=curves,
            attention=curves,
            attention_backward=curves,
            memory=(RatePoint(1e5, 2e10), RatePoint(1e8, 2.5e12)),
            optimizer=(RatePoint(1e5, 2e10), RatePoint(1e8, 2.5e12)),
            launch_seconds=6e-6,
            unit_seconds=3e-4,
        ),
        within=_link("within", 450e9 * scale, hop=2e-6),
        across=_link("across", 50e9 * scale, hop=5e-6),
        contention=0.1,
        stragglers=0.02,
        context_bytes=2**30,
        fragmentation=0.05,
        usable_fraction=0.98,
    )


def cpu_of(ranks: int = 2) -> Hardware:
    """Ranks that share the cores with their collectives."""
    gpus = hardware_of(1, ranks)
    rates = gpus.rates.model_copy(update={"launch_seconds": 2e-5})
    return gpus.model_copy(
        update={"name": "cores", "device": "cpu", "overlap": 0.0, "rates": rates, "contention": 0.0}
    )


def _link(name: str, speed: float, *, hop: float) -> Link:
    rate = CollectiveRate(base_seconds=2e-5, hop_seconds=hop, bytes_per_second=0.8 * speed)
    half = rate.model_copy(update={"bytes_per_second": 0.4 * speed})
    return Link(name=name, bytes_per_second=speed, all_gather=rate, reduce_scatter=rate, all_reduce=half)

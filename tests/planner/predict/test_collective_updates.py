"""Bytes of Muon and Adafactor and seconds of Muon are predicted from shapes; ranks measure the same bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.observe.memory import measure_peak_memory, storages_by_part
from fullshard.planner.predict.collective_updates import (
    collective_temporary_bytes,
    collective_update_seconds,
)
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import predict, search
from fullshard.spec.machine.hardware import CollectiveRate, Hardware, RatePoint
from fullshard.spec.plan import Plan
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from tests.fakes.hardware import cpu_of
from tests.planner.measured import (
    described,
    hardware_of_one_byte_per_second,
    measured,
    meta_model,
    plan_of,
    predicted,
)

NORMUON = "optimizer.muon.row_decay=0.9"
MUON, SOAP, ADAFACTOR = (f"optimizer.name={name}" for name in ("muon", "soap", "adafactor"))
EVERY_STEP = "optimizer.soap.precondition_frequency=1"
UNEVEN = ["model.d_ff=383", "model.d_model=120", "model.heads=4", "model.kv_heads=2"]


def measured_update(plan: Plan) -> int:
    """The most bytes of temporaries of an update, on a rank."""
    model, cpu = shard(meta_model(plan), plan), torch.device("cpu")
    optimizer = build_optimizer(model, plan)
    for _ in range(2):  # the first makes the state
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter.detach())
        before = storages_by_part(model, optimizer, device=cpu)
        held = sum(size for part in before.values() for size in part.values())
        with measure_peak_memory(cpu, model=model, optimizer=optimizer) as peak:
            optimizer.step()
        dist.barrier()
    return peak.bytes - held


@pytest.mark.parametrize(
    ("ranks_count", "more"),
    [
        (1, []),
        (2, []),
        (3, UNEVEN),
        (2, ["optimizer.muon.dtype=bf16"]),
        (4, ["sharding.strategy=hybrid_shard", "sharding.shard_degree=2"]),
        (2, ["model.experts=4", "model.experts_per_token=2"]),
        (4, ["sharding.tensor_parallel=2"]),
    ],
    ids=str,
)
def test_temporaries_of_an_update_are_measured_to_the_kilobyte(
    ranks_count: int, more: list[str], ranks
) -> None:
    plan = plan_of(ranks_count, MUON, *more)
    wanted = collective_temporary_bytes(described(plan), plan)
    assert ranks(ranks_count).run(measured_update, plan)[0] == pytest.approx(wanted, abs=1024)


@pytest.mark.parametrize(("ranks_count", "more"), [(2, []), (3, UNEVEN), (3, [*UNEVEN, NORMUON])], ids=str)
def test_a_peak_with_muon_is_the_measured_one(ranks_count: int, more: list[str], ranks) -> None:
    plan = plan_of(ranks_count, MUON, *more)
    terms, parts = predicted(plan), ranks(ranks_count).run(measured, plan)[0]
    assert terms.optimizer_state == parts["optimizer_state"]
    assert terms.total == pytest.approx(sum(parts.values()), rel=0.001)
    assert terms.optimizer_state < 0.8 * predicted(plan_of(ranks_count)).optimizer_state


@pytest.mark.parametrize(
    ("ranks_count", "more"),
    [
        (1, []),
        (2, []),
        (3, UNEVEN),
        (2, ["optimizer.soap.max_precondition_dim=128"]),
        (4, ["sharding.strategy=hybrid_shard", "sharding.shard_degree=2"]),
        (2, ["model.experts=4", "model.experts_per_token=2"]),
        (4, ["sharding.tensor_parallel=2"]),
    ],
    ids=str,
)
def test_bytes_of_soap_are_measured(ranks_count: int, more: list[str], ranks) -> None:
    """State exactly; temporaries of a refresh to a hundredth."""
    plan = plan_of(ranks_count, SOAP, EVERY_STEP, *more)
    wanted = collective_temporary_bytes(described(plan), plan)
    found = ranks(ranks_count).run(measured_update, plan)[0]
    assert found == pytest.approx(wanted, rel=0.01)
    terms, parts = predicted(plan), ranks(ranks_count).run(measured, plan)[0]
    assert terms.optimizer_state == parts["optimizer_state"]


@pytest.mark.parametrize(
    ("ranks_count", "more"),
    [
        (1, []),
        (3, UNEVEN),
        (4, ["sharding.strategy=hybrid_shard", "sharding.shard_degree=2"]),
        (2, ["model.experts=4", "model.experts_per_token=2"]),
        (4, ["model.experts=4", "model.experts_per_token=2", "sharding.expert_parallel=2"]),
        (4, ["sharding.tensor_parallel=2"]),
    ],
    ids=str,
)
def test_bytes_of_adafactor_are_measured(ranks_count: int, more: list[str], ranks) -> None:
    """State exactly; temporaries not below what is measured, nor twice as high."""
    plan = plan_of(ranks_count, ADAFACTOR, *more)
    wanted = collective_temporary_bytes(described(plan), plan)
    found = ranks(ranks_count).run(measured_update, plan)[0]
    assert wanted / 2 < found < wanted + 1024
    terms, parts = predicted(plan), ranks(ranks_count).run(measured, plan)[0]
    assert terms.optimizer_state == parts["optimizer_state"]
    assert terms.optimizer_state < 0.1 * predicted(plan_of(ranks_count, *more)).optimizer_state


class CountSent(TorchDispatchMode):
    """Counts the bytes of the messages that this rank sends, and in all-reduces of two ranks half of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("c10d::send", "c10d::allreduce_"):
            share = 1 if func._schema.name == "c10d::send" else 0.5
            self.bytes += share * sum(one.nbytes for one in args[0])
        return func(*args, **(kwargs or {}))


def sent_in_update(plan: Plan) -> float:
    model = shard(meta_model(plan), plan)
    optimizer = build_optimizer(model, plan)
    for _ in range(2):  # the first of SOAP is another
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter.detach())
        with CountSent() as count:
            optimizer.step()
    return count.bytes


@pytest.mark.parametrize(("count", "dtype", "itemsize"), [(2, "fp32", 4), (2, "bf16", 2), (4, "fp32", 4)])
def test_ranks_send_what_the_formula_says(count: int, dtype: str, itemsize: int, ranks) -> None:
    """2 (W - 1) / W² P b, in all 2 (W - 1) / W P b; the matrices here are dealt evenly to two ranks."""
    plan = plan_of(count, MUON, f"optimizer.muon.dtype={dtype}")
    elements = sum(p.numel for u in described(plan).units for p in u.parameters if p.is_hidden_matrix)
    sent = ranks(count).run(sent_in_update, plan)
    assert sum(sent) == 2 * (count - 1) * elements * itemsize // count
    if count == 2:
        assert sent[0] == sent[1]


def one_byte_per_second(ranks: int) -> Hardware:
    """Ranks that compute at once, and take a second for each byte that they send."""
    hardware = hardware_of_one_byte_per_second(ranks)
    rates = hardware.rates
    fast = [RatePoint(1.0, 1e30)]
    quick = rates.model_copy(update={"matmul": {"fp32": fast}, "memory": fast, "optimizer": fast})
    link = hardware.within.model_copy(update={"all_reduce": hardware.within.all_gather})
    return hardware.model_copy(update={"rates": quick, "within": link})


@pytest.mark.parametrize(
    "more", [[MUON], [MUON, NORMUON], [SOAP], [SOAP, EVERY_STEP], [ADAFACTOR]], ids=" ".join
)
def test_predicted_seconds_are_those_of_the_bytes_that_are_sent(more: list[str], ranks) -> None:
    plan = plan_of(2, *more)
    found = collective_update_seconds(described(plan), plan, hardware=one_byte_per_second(2))
    sent = sum(ranks(2).run(sent_in_update, plan)) / 2
    if more == [SOAP]:  # a tenth of the refreshes, none of which is in the measured step
        assert sent < found.exchanges < 1.1 * sent
    else:
        assert found.exchanges == pytest.approx(sent)


def test_a_wider_group_takes_less_time_for_newton_schulz_until_a_matrix_is_left() -> None:
    plans = [plan_of(n, MUON, "model.layers=1") for n in (1, 2, 4, 16)]
    free = CollectiveRate(base_seconds=0, hop_seconds=0, bytes_per_second=1e30)
    hardware = cpu_of(16)
    link = hardware.within.model_copy(update={"all_gather": free})
    fast = hardware.model_copy(update={"within": link})
    seconds = [sum(collective_update_seconds(described(plans[0]), plan, hardware=fast)) for plan in plans]
    assert seconds[0] > 1.9 * seconds[1]
    assert seconds[1] > 1.5 * seconds[2]
    assert seconds[3] == pytest.approx(max(seconds[3], seconds[2] / 2), rel=0.5)


def test_the_search_plans_muon_as_it_plans_adamw() -> None:
    plan = plan_of(2, MUON)
    spec = described(plan)
    found = search(spec, cpu_of(2), plan.run).best
    assert found is not None
    both = [require_prediction(predict(spec, one, cpu_of(2))) for one in (plan, plan_of(2))]
    assert both[0].time.optimizer > both[1].time.optimizer
    assert both[0].memory.optimizer_state < both[1].memory.optimizer_state

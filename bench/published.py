"""Holds the predicted step time against published ones, row by row (bench/published.toml).

python bench/published.py [PART_OF_A_NAME]      # the rows beside which the rates were made
python bench/published.py --set=7 [PART]        # the rows of a blind set
python bench/published.py --mixtures [PART]     # mixtures of experts; with --own, as fullshard computes them
python bench/published.py --fit                 # what matmul rate the rows ask for that set one
"""

import statistics
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt import GptModel
from mixtures import FusedModel, PaddedModel, WideModel
from spelled import SpelledModel, mean_loss
from torch import nn

from fullshard.errors import FullshardError
from fullshard.models.chunked_loss import AUTO_ROWS
from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import Loss, next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.phases import build_schedule, phase_costs
from fullshard.planner.search.search import predict
from fullshard.spec.machine.catalog import catalog_chip_hardware, find_catalog_entry_of_chip, hardware_on
from fullshard.spec.machine.certainty import speed_deviation
from fullshard.spec.machine.hardware import CollectiveRate, Hardware, Link, curve_with_slowdown
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig

ROWS = Path(__file__).with_name("published.toml")
PREDICTED_SETS = range(8)  # 0: the rows beside which the rates were made
OLDER_RATES = tomllib.loads(ROWS.read_text())["older_matmul_flops_per_second"]
ONE_DIE = ("H100 SXM", "H200 SXM")  # at one power, so that they have one rate
# By what older kernels of attention take longer than FlashAttention-2, in forward and in backward.
# Its paper, arXiv:2307.08691, section 4.1: 1.3 to 1.5 times and around 2 times as fast as "FlashAttention
# in Triton". "unfused" attention is not one kernel, but traced operation by operation: see bench/gpt.py.
KERNELS = {"triton": (1.4, 2.0)}
# Seconds in which a program's host issues one block's forward and backward, where it is known (`host`).
# Megatron with modules of Transformer Engine, without CUDA graphs: the least of three microbatches of 36
# blocks, which take 152, 158 and 162 ms with four or eight ranks per matmul (the page of Megatron
# Bridge in set 5). Such modules cost a host 2.7 times those of torch (NVIDIA/TransformerEngine#2053).
HOST_SECONDS_PER_BLOCK = {"transformer_engine": 0.152 / 36}


# What ranks that share matmuls do with the modules of bench/gpt.py and bench/spelled.py.
GPT_STYLES = {
    "embedding": "embedding",
    "blocks.0": "cut_input",
    "blocks.*.attention_norm": "gather_output",
    "blocks.*.feed_forward_norm": "gather_output",
    "blocks.*.inputs": "colwise_3",
    "blocks.*.output": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "norm": "gather_output",
    "head": "head",
}
WITHOUT_INPUTS = {name: style for name, style in GPT_STYLES.items() if style != "colwise_3"}
GROUPED_GPT_STYLES = {**WITHOUT_INPUTS, "blocks.*.query": "colwise", "blocks.*.key_value": "colwise_2"}
SPELLED_STYLES = {
    **WITHOUT_INPUTS,
    **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "gate", "up")},
}


def styles_of(row: dict[str, Any]) -> dict[str, str]:
    if row["model"].get("norm") == "operations" and "mixture" not in row:
        return SPELLED_STYLES
    if row["model"]["gated"]:
        return {}
    return GPT_STYLES if row["model"]["heads"] == row["model"]["kv_heads"] else GROUPED_GPT_STYLES


# Embedding, last norm and head are gathered with the root: `fully_shard` on each block, then on the model.
ROOT_UNIT = ('sharding.units.names=["blocks.*"]',)


def rows_of(*sets: int, mixtures: bool = False) -> list[dict[str, Any]]:
    """The rows of these sets, each with the keys of its series below its own."""
    table = tomllib.loads(ROWS.read_text())
    rows = [table["series"].get(row.get("series"), {}) | row for row in table["row"]]
    return [row for row in rows if row.get("set", 0) in sets and ("mixture" in row) == mixtures]


def hardware_of(row: dict[str, Any]) -> Hardware:
    """The chip as the catalog has it; the network and the kernel of attention as the source tells."""
    entry = find_catalog_entry_of_chip(hardware_on(row["chip"]).chip)
    assert entry is not None, "every row's chip is in the catalog"
    if row.get("older_software"):
        entry = entry.model_copy(update={"matmul_flops_per_second": OLDER_RATES[entry.name]})
    one = catalog_chip_hardware(entry, attention_kernel="cudnn" if row["attention"] == "cudnn" else "flash")
    hardware = one.with_rank_counts(nodes=row["nodes"], ranks_per_node=row["gpus_per_node"])
    hardware = with_kernel(hardware, row["attention"])
    if row.get("mixture", {}).get("in_turn"):
        rates = hardware.rates.model_copy(update={"grouped_matmul": None})
        hardware = hardware.model_copy(update={"rates": rates})
    published = row.get("across_gb_per_second_per_gpu")
    if published is None or hardware.across is None:
        return hardware
    return hardware.model_copy(update={"across": slowed(hardware.across, published * 1e9)})


def with_host(hardware: Hardware, row: dict[str, Any], *, spec: ModelSpec, plan: Plan) -> Hardware:
    """The hardware, with the row's host, which launches a microbatch as slowly as the program does."""
    if "host" not in row:
        return hardware
    trace = spec.trace_for_plan(plan)
    costs = phase_costs(trace.phases, spec.kernels, rates=hardware.rates, microbatch=plan.microbatch)
    turns = build_schedule(spec, trace, phases=trace.phases).repeats
    launches = sum(cost.launches * times for cost, times in zip(costs, turns, strict=True))
    issued = HOST_SECONDS_PER_BLOCK[row["host"]] * row["model"]["layers"]
    rates = hardware.rates.model_copy(update={"launch_seconds": issued / launches})
    return hardware.model_copy(update={"rates": rates})


def with_kernel(hardware: Hardware, name: str) -> Hardware:
    """The hardware, with a kernel of attention that is older than the catalog's."""
    forward, backward = KERNELS.get(name, (1.0, 1.0))
    rates = hardware.rates
    attention = {dtype: curve_with_slowdown(curve, forward) for dtype, curve in rates.attention.items()}
    again = {dtype: curve_with_slowdown(curve, backward) for dtype, curve in rates.attention_backward.items()}
    rates = rates.model_copy(update={"attention": attention, "attention_backward": again})
    return hardware.model_copy(update={"rates": rates})


def slowed(link: Link, bytes_per_second: float) -> Link:
    """The link with another peak, at the same part of which its collectives run."""
    part = bytes_per_second / link.bytes_per_second

    def rate(old: CollectiveRate) -> CollectiveRate:
        return old.model_copy(update={"bytes_per_second": old.bytes_per_second * part})

    rates = {kind: rate(old) for kind, old in link.known_rates.items()}
    return link.model_copy(update={"bytes_per_second": bytes_per_second, **rates})


def plan_of(row: dict[str, Any]) -> Plan:
    world = row["nodes"] * row["gpus_per_node"]
    ranks = world // (row.get("tensor_parallel", 1) * row.get("context_parallel", 1))
    shapes = {k: v for k, v in row["model"].items() if k not in ("gated", "positions", "norm", "head_dim")}
    shapes["max_sequence"] = row["sequence_length"]
    strategy = row["strategy"] if world > row.get("tensor_parallel", 1) else "full_shard"
    torchtitan = "torchtitan" in row["name"] or "torchao" in row["name"]
    overrides = [
        *(f"model.{key}={str(value).lower()}" for key, value in shapes.items()),
        f"data.sequence_length={row['sequence_length']}",
        f"train.microbatch={row['microbatch']}",
        f"train.global_batch={row['microbatch'] * row['accumulation'] * ranks}",
        f"train.gradient_sync={row.get('gradient_sync', 'every_microbatch')}",
        f"sharding.strategy={strategy}",
        f"sharding.tensor_parallel={row.get('tensor_parallel', 1)}",
        f"sharding.context_parallel={row.get('context_parallel', 1)}",
        f"sharding.expert_parallel={row.get('expert_parallel', 1)}",
        *(
            [f"sharding.shard_degree={row.get('shard_group', row['gpus_per_node'])}"]
            if "hybrid" in strategy
            else []
        ),
        *(ROOT_UNIT if row.get("root_unit") else []),
        *_recompute_settings(row),
        f"recompute.save_matmuls={2 if torchtitan else 1}",
        f"precision.mode={row['precision']}",
        f"run.compile={str(row['compile']).lower()}",
        "run.device=cuda",
    ]
    run = Run.load(overrides=overrides)
    sharding = run.sharding.model_copy(update={"tensor_parallel_styles": styles_of(row)})
    run = run.model_copy(update={"sharding": sharding})
    plan = Plan.from_run(run, world_size=world, device="cuda")
    # Who keeps all in bf16 there updates it by fused AdamW, and does not round stochastically.
    own = {"reduce": row["reduce"]} if "reduce" in row else {}
    precision = plan.precision.model_copy(update={"stochastic_rounding": False, **own})
    return plan.model_copy(update={"precision": precision})


SPECS: dict[str, ModelSpec] = {}


def _recompute_settings(row: dict[str, Any]) -> list[str]:
    """Returns the settings of a row. `every` k-th block that recomputes counts as the first 1 / k of them."""
    if row["recompute"] != "every":
        return [f"recompute.mode={row['recompute']}"]
    return ["recompute.mode=full", f"recompute.blocks={-(-row['model']['layers'] // row.get('every', 2))}"]


def loss_of(row: dict[str, Any]) -> Loss:
    """The loss with logits in full, or the chunked one where the row's program never has them in full."""
    if row.get("loss") == "fused":
        return partial(next_token_loss, chunk_rows=AUTO_ROWS)
    spelled = row["model"].get("norm") == "operations"
    return mean_loss if spelled and "KempnerForge" in row["name"] else next_token_loss


def spec_of(row: dict[str, Any], plan: Plan) -> ModelSpec:
    loss, run = loss_of(row), plan.run
    parallel = (run.sharding.context_degree, plan.tensor_parallel, plan.expert_parallel)
    settings = (run.sharding.units, parallel, run.recompute, run.run.compile, row.get("mixture"))
    dropout = row["attention_dropout"] if row["attention"] == "unfused" else None
    key = str((row["model"], row["sequence_length"], settings, plan.precision, loss, dropout))
    if key not in SPECS:
        with torch.device("meta"):
            model: nn.Module = kind_of(row, dropout)(plan.run.decoder_config)
        spec = describe(model, plan, loss=loss, device_type="cuda")
        balanced = row.get("mixture", {}).get("balanced")
        SPECS[key] = spec.model_copy(update={"routing_spread": 0.0}) if balanced else spec
    return SPECS[key]


def kind_of(row: dict[str, Any], dropout: float | None) -> Callable[[DecoderConfig], nn.Module]:
    """The module that computes as the row's program does."""
    shapes = row["model"]
    if "mixture" in row:
        own = row["mixture"]
        wide = {"head_dim": shapes.get("head_dim", shapes["d_model"] // shapes["heads"])}
        return {
            "padded": partial(PaddedModel, fullest=own.get("fullest")),
            "fused": partial(
                FusedModel,
                copies=own.get("copies"),
                fused_rotation=own.get("fused_rotation", False),
                **wide,
            ),
            "grouped": partial(WideModel, **wide),
        }[own["experts"]]
    if shapes.get("norm") == "operations":
        return partial(SpelledModel, head_dim=shapes.get("head_dim"))
    return DecoderModel if shapes["gated"] else partial(GptModel, attention_dropout=dropout)


def tokens_per_second(row: dict[str, Any], *, scale: float = 1.0) -> float:
    """Predicted, of one GPU, with matmuls so much faster."""
    hardware, plan = hardware_of(row), plan_of(row)
    matmul = {
        dtype: tuple(point._replace(rate=point.rate * scale) for point in curve)
        for dtype, curve in hardware.rates.matmul.items()
    }
    rates = hardware.rates.model_copy(update={"matmul": matmul})
    spec = spec_of(row, plan)
    hardware = with_host(hardware.model_copy(update={"rates": rates}), row, spec=spec, plan=plan)
    found = predict(spec, plan, hardware).prediction
    assert found is not None, "predict was asked"
    return found.tokens_per_second / plan.world_size


def asked_rate(row: dict[str, Any]) -> float:
    """Returns the rate of large matmuls at which the prediction equals the published speed, in FLOP/s."""
    low, high = 0.2, 3.0
    while high / low > 1.0005:
        middle = (low * high) ** 0.5
        slower = tokens_per_second(row, scale=middle) < row["tokens_per_second_per_gpu"]
        low, high = (middle, high) if slower else (low, middle)
    return hardware_of(row).rates.matmul["bf16"][-1].rate * low


def fit() -> None:
    """Prints what each row of use "fit" asks for, and what rows of 1B and more ask of H100 and H200.

    The latter is the median over programs of the median of their rows on several GPUs: a program with many
    rows counts once.
    """
    programs: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for row in rows_of(0, 1, 2):
        if row["use"] == "fit":
            print(f"{row['chip']}: {asked_rate(row):.4g} FLOP/s, by {row['name']}")
        is_test = row["use"] == "test" and row["chip"] in ONE_DIE and row["nodes"] * row["gpus_per_node"] > 1
        if is_test and spec_of(row, plan_of(row)).numel > 1e9:
            own = programs[row.get("older_software", False)]
            own.setdefault(row["name"].split()[0], []).append(asked_rate(row))
    for older, rates in programs.items():
        medians = {name: statistics.median(own) for name, own in rates.items()}
        print(f"{' and '.join(ONE_DIE)}, {'older software' if older else 'since mid-2024'}:", end=" ")
        print(f"{statistics.median(medians.values()):.4g} FLOP/s, the median of", end=" ")
        print(", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in medians.items()))


def main(*arguments: str) -> None:
    if "--fit" in arguments:
        fit()
        return
    number = next((int(a.removeprefix("--set=")) for a in arguments if a.startswith("--set=")), 0)
    if number not in PREDICTED_SETS:
        raise SystemExit(f"no set {number}: there are 0 to {max(PREDICTED_SETS)}")
    part = "".join(argument for argument in arguments if not argument.startswith("--"))
    errors: list[float] = []
    within = 0
    asked = [row for row in rows_of(number, mixtures="--mixtures" in arguments) if part in row["name"]]
    if not asked:
        raise SystemExit(f"no row of set {number} has {part!r} in its name")
    for row in asked:
        if "--own" in arguments:
            row["mixture"] = {"experts": "grouped", "balanced": row["mixture"].get("balanced", False)}
        plan, hardware = plan_of(row), hardware_of(row)
        try:
            spec = spec_of(row, plan)
            hardware = with_host(hardware, row, spec=spec, plan=plan)
            prediction = predict(spec, plan, hardware).prediction
        except FullshardError as error:
            print(f"{row['name']}: {error}")
            continue
        assert prediction is not None, "predict was asked"
        rate = prediction.tokens_per_second / plan.world_size
        error = rate / row["tokens_per_second_per_gpu"] - 1
        bars = speed_deviation(spec.numel, hardware, mixture="mixture" in row)
        assert bars is not None, "the chip is no CPU"
        inside = bars.low <= error <= bars.high
        if row["use"] == "test":
            errors.append(abs(error))
            within += inside
        published = row.get("peak_memory_gib")
        kind = row.get("peak_memory_kind", "reserved")
        needed = prediction.total_reserved_bytes if kind == "reserved" else prediction.memory.total
        memory = f"{kind} {needed / 2**30:6.1f} GiB, published {published}" if published else ""
        terms = " ".join(f"{n[:12]} {s:.2f}" for n, s in prediction.time.terms().items() if s > 0.005)
        print(
            f"{row['use']:5s} {row['name'][:76]:76s} published {row['tokens_per_second_per_gpu']:8.0f} "
            f"ours {rate:8.0f} {100 * error:+6.1f} %{' ' if inside else '!'} {memory}  "
            f"{prediction.time.total:.2f} s: {terms}"
        )
    if errors:
        median, worst = 100 * statistics.median(errors), 100 * max(errors)
        print(
            f"{len(errors)} test rows: median {median:.1f} %, worst {worst:.1f} %, "
            f"{within} within their error bars (others: !)"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Batches that are known to run on a GPU are planned as fitting."""

import pytest
import torch

from fullshard.models.decoder import DecoderModel
from fullshard.models.loss import choose_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import search
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.run import Run

# OLMo-core, src/scripts/train/OLMo2/OLMo2-1B.py: microbatches of 8 × 4,096 tokens on H100 of 80 GB.
OLMO_1B = {"vocabulary": 100352, "d_model": 2048, "layers": 16, "heads": 16, "kv_heads": 16, "d_ff": 8192}


@pytest.mark.parametrize("strategy", ["auto", pytest.param("full_shard", marks=pytest.mark.long)])
def test_eight_sequences_of_olmo_1b_fit_80_gb(strategy: str):
    sizes = [f"model.{key}={value}" for key, value in (OLMO_1B | {"max_sequence": 4096}).items()]
    settings = ["data.sequence_length=4096", "train.microbatch=8", "train.global_batch=64"]
    settings += ["precision.mode=bf16", "recompute.mode=none", f"sharding.strategy={strategy}"]
    run = Run.load(overrides=[*sizes, *settings, "run.device=cuda", "run.compile=true"])
    with torch.device("meta"):
        model = DecoderModel(run.decoder_config)
    spec = describe(model, run, loss=choose_loss(run, model), device_type="cuda")
    best = search(spec, hardware_on("8xH100"), run).best
    assert best is not None
    assert best.microbatch == 8
    assert not best.run.offload.offloads_optimizer
    prediction = require_prediction(best)
    assert prediction.required_device_bytes <= 0.95 * prediction.capacity_bytes

"""The examples in the docstrings of `fullshard`'s functions run, and print what they show."""

import contextlib
import doctest
import inspect
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fullshard
from tests.weights.test_export_adapters import random_adapters

SETTINGS = """
model = { vocabulary = 256, d_model = 32, layers = 2, heads = 2, kv_heads = 2, d_ff = 64, max_sequence = 32 }
data = { sequence_length = 32, source = "text", paths = ["texts/text.txt"], cache = "tokens" }
train = { steps = 3, global_batch = 2, microbatch = 2 }
sharding = { strategy = "full_shard" }
run = { device = "cpu" }
"""
# The examples of a run, in an order in which each finds what the ones before it made.
ORDER = [
    *("call_on_rank_zero", "detect_hardware", "process_group", "describe", "plan", "search"),
    *("plan_page", "predict", "peak_bytes"),
    *("build_data", "resolve_epochs", "shard", "build_optimizer", "train", "generate"),
    *("averaged_weights", "full_state", "iterate_weights"),
    *("next_token_loss", "chunked_cross_entropy", "cut_sequences", "save", "load", "latest_checkpoint"),
    *("location_of", "export", "load_pretrained", "export_hf", "meta_model", "materialize"),
    *("parameters_on_meta", "hardware_on", "adapters_off", "export_peft"),
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def documented() -> set[str]:
    """Returns the names of the public functions."""
    return {name for name in fullshard.__all__ if inspect.isfunction(getattr(fullshard, name))}


def run_examples(settings: str, order: list[str]) -> str:
    """Runs the examples in an empty directory, with one namespace, and returns what was not as shown."""
    import peft
    import safetensors.torch
    import torch
    import transformers

    report: list[str] = []
    with TemporaryDirectory() as directory, contextlib.chdir(directory):
        Path("run.toml").write_text(settings)
        Path("texts").mkdir()
        Path("texts/text.txt").write_text("An example of a text. " * 60)
        Path("checkpoints.key").write_text("0123456789abcdef" * 4)
        os.chmod("checkpoints.key", 0o600)
        run = fullshard.Run.load("run.toml")
        names: dict[str, Any] = {
            **{"fs": fullshard, "torch": torch, "safetensors": safetensors, "peft": peft},
            **{"transformers": transformers, "run": run},
            "tokens": torch.arange(64).view(2, 32),
            "labels": torch.arange(1, 65).view(2, 32),
        }
        runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
        for name in order:
            if name == "export_peft":
                Path("base").symlink_to("llama")
                random_adapters(Path())
                Path("checkpoints/step-00000000").rename("adapted")
            text = inspect.getdoc(getattr(fullshard, name)) or ""
            test = doctest.DocTestParser().get_doctest(text, names, name, name, 0)
            if not test.examples:
                report.append(f"{name} has no example")
            runner.run(test, out=report.append, clear_globs=False)
            names.update(test.globs)
    return "\n".join(report)


def test_every_function_has_an_example_that_runs(ranks: Any) -> None:
    assert sorted(ORDER) == sorted(documented())
    assert ranks(1).run(run_examples, SETTINGS, ORDER) == [""]

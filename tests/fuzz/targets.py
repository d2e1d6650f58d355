"""Readers of foreign files: for each, a valid input, ways to break it, and a function that reads it.

A target's `make` writes one mutated input into an empty directory; its `read` does with it what a user would.
`read` may return, or raise a FullshardError.
"""

import gzip
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.manifest import MANIFEST, METADATA, SHARDS, read_manifest
from fullshard.cli.main import main
from fullshard.convert.conversion import convert_config
from fullshard.data.build import build_data
from fullshard.data.chat_template import ChatTemplate
from fullshard.data.conversation import Conversation
from fullshard.data.files import SourceFile
from fullshard.data.memmaps import open_memmap_stores
from fullshard.data.readers import RecordKind, read_records, split_file
from fullshard.data.row_fields import UntokenizableRecordError
from fullshard.data.token_store import make_cache_directory, no_heartbeat
from fullshard.data.tokenizer import open_tokenizer
from fullshard.errors import DataError, SpecError
from fullshard.models.huggingface import build_hf_model
from fullshard.planner.search.search import search
from fullshard.spec.machine.catalog import hardware_on
from fullshard.spec.plan import Plan
from fullshard.spec.pretrained import read_config
from fullshard.spec.run import Run
from fullshard.spec.settings.data_section import DataSourceFields
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.system.files import xxh3_digest
from fullshard.weights.export import export
from fullshard.weights.files import open_pretrained_files
from tests.checkpoint.states import saved
from tests.data import hostile
from tests.data.samples import CHAT, save_tokenizer, texts_file
from tests.fakes.architectures_hf import CONFIGS
from tests.fakes.plans import plan_of
from tests.fakes.specs import Shape, decoder_spec, run_for
from tests.faults.crowd import Anything
from tests.fuzz.mutations import HOSTILE, mutated_bytes, mutated_json, mutated_lines
from tests.report import runs
from tests.report.profiles import made_step

SHAPE = Shape(layers=4, d_model=512, d_ff=1024, vocabulary=4096, sequence=256)
MEMORY_TEMPLATES = ("product", "center", "format", "indent", "recursion")  # those without end take seconds
LONG = 1 << 40  # bytes of a file that is too long to be read
CONVERTED = Path(__file__).parents[1] / "convert" / "configs"


@dataclass(frozen=True)
class Target:
    """make(seeds, directory, rng): `seeds` holds what `prepare` has written."""

    make: Callable[[Path, Path, Random], None]
    read: Callable[[Path], object]


def prepare(seeds: Path) -> None:
    """Writes valid inputs of every kind into `seeds`."""
    for step in (1, 2):
        saved(seeds / "checkpoints", step)
    save_tokenizer(seeds / "tokenizer", template=CHAT)
    texts_file(seeds / "texts.jsonl", 30)
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(5)}, seeds / "model.safetensors")
    np.save(seeds / "tokens.npy", np.arange(64, dtype=np.uint16))
    np.arange(64, dtype=np.uint16).tofile(seeds / "tokens.bin")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    arrays = (np.full(4, 16, "<i4"), np.arange(4, dtype="<i8") * 32, np.arange(5, dtype="<i8"))
    (seeds / "tokens.idx").write_bytes(head + b"".join(one.tobytes() for one in arrays))
    plan_of(2).save(seeds / "plan.json")
    (seeds / "run.toml").write_text(RUN)
    runs.finished(seeds / "run", steps=12)
    made_step(("fullshard::forward", 1, 5), ("FSDP::all_gather (layers.0)", 2, 3), end=9).write(
        seeds / "run", step=10, rank=0
    )
    hardware_on("8xH100").save(seeds / "hardware.toml")


RUN = """
[model]
dim = 64
layers = 2
[data]
source = "jsonl"
paths = ["texts.jsonl"]
sequence_length = 64
[train]
steps = 10
batch_tokens = 1024
[optimizer]
name = "adamw"
learning_rate = 3e-4
betas = [0.9, 0.95]
[schedule]
kind = "cosine"
warmup_steps = 2
[sharding]
strategy = "full_shard"
[checkpoint]
every = 2
dir = "checkpoints"
[fault_tolerance]
watchdog_timeout_seconds = 300.0
[run]
ranks = 2
seed = 1
dir = "runs/x"
"""


# --- checkpoints -------------------------------------------------------------------------------------------


def make_checkpoint(name: str, seeds: Path, directory: Path, rng: Random) -> None:
    """Breaks one JSON file, or the table of a data file, of the newer checkpoint.

    Mostly with the digests that an attacker would write.
    """
    shutil.copytree(seeds / "checkpoints", directory / "checkpoints")
    path = directory / "checkpoints" / "step-00000002"
    begin = 0 if name == MANIFEST else read_manifest(path).files[name].digest_begin
    whole = (path / name).read_bytes()
    data = mutated_json(json.loads(whole[begin:]), rng)
    (path / name).write_bytes(whole[:begin] + data)
    if rng.random() < 0.9:
        sign(path, {name: data} if name != MANIFEST else {})


def make_metadata(seeds: Path, directory: Path, rng: Random) -> None:
    """Replaces DCP's pickle by one that creates `marker` where it is read."""
    shutil.copytree(seeds / "checkpoints", directory / "checkpoints")
    path = directory / "checkpoints" / "step-00000002"
    attack = pickle.dumps(Marks(directory / "marker"), protocol=rng.randrange(6))
    data = attack if rng.random() < 0.5 else mutated_bytes((path / METADATA).read_bytes(), rng)
    (path / METADATA).write_bytes(data)
    sign(path, {METADATA: data})


def make_files(seeds: Path, directory: Path, rng: Random) -> None:
    """Breaks any entry of either checkpoint or of their directory, or adds one."""
    shutil.copytree(seeds / "checkpoints", directory / "checkpoints")
    for _ in range(rng.choice((1, 1, 2, 4))):
        regular = [
            one
            for one in sorted(directory.glob("checkpoints/*/*"))
            if one.is_file() and not one.is_symlink() and one.stat().st_size < LONG
        ]
        if not regular:
            return
        path = rng.choice(regular)
        match rng.randrange(7):
            case 0:
                path.write_bytes(mutated_bytes(path.read_bytes(), rng))
            case 1:
                replace(
                    path, lambda one: one.symlink_to(rng.choice(("/etc/passwd", "nowhere", ".", one.name)))
                )
            case 2:
                replace(path, os.mkfifo)
            case 3:
                replace(path, Path.mkdir)
            case 4:
                os.truncate(path, LONG)
            case 5:
                stray = path.parents[rng.randrange(2)] / rng.choice(
                    (METADATA, MANIFEST, "step-00000009", "latest")
                )
                replace(stray, lambda one: one.symlink_to("nowhere"))
            case _:
                path.rename(path.with_name(rng.choice(("x", "..x", "step-00000003", "é"))))


class Marks:
    """A pickle of this makes a directory where it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def replace(path: Path, make: Callable[[Path], object]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def sign(path: Path, contents: dict[str, bytes]) -> None:
    """Puts digests of `contents` into the manifest, and the manifest's own; as far as it is one."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        for name, data in contents.items():
            begin = manifest["files"][name]["digest_begin"]
            manifest["files"][name] |= {"size_bytes": begin + len(data), "digest": xxh3_digest(data)}
    except (ValueError, RecursionError, TypeError, KeyError):
        return
    if isinstance(manifest, dict):
        blank = json.dumps({**manifest, "digest": "0" * 32})
        text = blank.replace(
            '"digest": "' + "0" * 32 + '"}', f'"digest": "{xxh3_digest(blank.encode())}"' + "}"
        )
        (path / MANIFEST).write_text(text)


def read_checkpoint(directory: Path) -> None:
    checkpoints = directory / "checkpoints"
    for path in sorted(checkpoints.glob("step-*")):
        if path.is_dir():
            list(iterate_damage(path))
    each(
        lambda: export(checkpoints, directory / "model.safetensors"),
        lambda: load(Anything(), checkpoints),
        lambda: load(Anything(), checkpoints / "step-00000002"),
    )


def each(*acts: Callable[[], object]) -> None:
    """Does all of them, and raises what the last one that failed raised."""
    failed: Exception | None = None
    for act in acts:
        try:
            act()
        except Exception as error:  # noqa: BLE001
            failed = error
    if failed is not None:
        raise failed


# --- models and settings -----------------------------------------------------------------------------------


def make_safetensors(seeds: Path, directory: Path, rng: Random) -> None:
    data = (seeds / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.7:
        text = mutated_json(header, rng)
        stated = rng.choice((len(text), len(text), len(text), len(text) + 1, 2**63, 0))
        data = stated.to_bytes(8, "little") + text + data[8 + length :]
    else:
        data = mutated_bytes(data, rng)
    (directory / "model.safetensors").write_bytes(data)


def make_weights_index(seeds: Path, directory: Path, rng: Random) -> None:
    shutil.copy(seeds / "model.safetensors", directory / "one.safetensors")
    tree = {"metadata": {"total_size": 68}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (directory / "model.safetensors.index.json").write_bytes(mutated_json(tree, rng))


def make_config(seeds: Path, directory: Path, rng: Random) -> None:
    config = (
        CONFIGS[rng.choice(("llama", "gpt2", "qwen3_moe", "t5", "vit"))]
        if rng.random() < 0.5
        else CONFIGS["llama"]
    )
    (directory / "config.json").write_bytes(mutated_json(config, rng))


def read_model(directory: Path) -> None:
    read_config(directory / "config.json")
    build_hf_model(HuggingFaceModel(hf=str(directory)))


def make_lines(name: str, seeds: Path, directory: Path, rng: Random) -> None:
    (directory / name).write_bytes(mutated_lines((seeds / name).read_text(), rng))


def make_tree(name: str, seeds: Path, directory: Path, rng: Random) -> None:
    (directory / name).write_bytes(mutated_json(json.loads((seeds / name).read_bytes()), rng))


def make_converted(seeds: Path, directory: Path, rng: Random) -> None:
    source = rng.choice(sorted(CONVERTED.iterdir()))
    text = source.read_text()
    data = mutated_json(json.loads(text), rng) if source.suffix == ".json" else mutated_lines(text, rng)
    (directory / source.name).write_bytes(data)


def read_converted(directory: Path) -> None:
    from fullshard.system.small_files import SETTINGS_BYTES, read_text

    (path,) = directory.iterdir()
    try:
        text = read_text(path, most_bytes=SETTINGS_BYTES)
    except ValueError as error:  # as the command does
        raise SpecError(f"{path} is not text.") from error
    convert_config(text, name=path.name).run_toml_text()


# --- data --------------------------------------------------------------------------------------------------


def make_tokenizer(seeds: Path, directory: Path, rng: Random) -> None:
    shutil.copytree(seeds / "tokenizer", directory, dirs_exist_ok=True)
    name = rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    tree = json.loads((directory / name).read_bytes())
    (directory / name).write_bytes(mutated_json(tree, rng))


def read_tokenizer(directory: Path) -> None:
    def write_out() -> None:
        template = ChatTemplate(str(directory))
        with suppress(
            UntokenizableRecordError
        ):  # which leaves a record out, or ends the run, as the settings say
            message = {"role": "user", "content": "the cat"}
            template.encode_conversation(Conversation([message]), train_on="all")

    each(lambda: open_tokenizer(str(directory)).encode_texts("the cat"), write_out)


def make_tokens(seeds: Path, directory: Path, rng: Random) -> None:
    for name in ("tokens.npy", "tokens.bin", "tokens.idx"):
        shutil.copy(seeds / name, directory)
    path = directory / rng.choice(("tokens.npy", "tokens.bin", "tokens.idx", "tokens.idx"))
    data = path.read_bytes()
    if rng.random() < 0.5:  # a number of the header, or of the arrays
        at = rng.randrange(9, min(len(data) - 8, 140))
        number = rng.choice((0, 1, 2**31, 2**62, 2**63, 2**64 - 1))
        data = data[:at] + number.to_bytes(8, "little") + data[at + 8 :]
    else:
        data = mutated_bytes(data, rng)
    path.write_bytes(data)


def read_tokens(directory: Path) -> None:
    def stores(name: str) -> None:
        fields = DataSourceFields(paths=(str(directory / name),))
        root = make_cache_directory(str(directory / "cache"))
        for store in open_memmap_stores(fields, root=root, alive=no_heartbeat):
            for begin, end in zip(store.begins[:10], store.ends[:10], strict=True):
                store.tokens[begin:end].sum()

    each(lambda: stores("tokens.npy"), lambda: stores("tokens.bin"))


def make_texts(seeds: Path, directory: Path, rng: Random) -> None:
    rows = [json.loads(line) for line in (seeds / "texts.jsonl").read_text().splitlines()]
    place = rng.randrange(len(rows))
    lines = [json.dumps(row).encode() for row in rows]
    lines[place] = (
        mutated_json(rows[place], rng) if rng.random() < 0.7 else json.dumps(rng.choice(HOSTILE)).encode()
    )
    data = b"\n".join(lines)
    (directory / "texts.jsonl").write_bytes(mutated_bytes(data, rng) if rng.random() < 0.3 else data)


def read_texts(directory: Path) -> None:
    data = {"source": "jsonl", "paths": [f"{directory}/texts.jsonl"], "cache": str(directory / "cache")}
    settings = {"sequence_length": 16, "processes": 1, "packing": "best_fit"}
    build_data(Run.parse({"data": data | settings}, source="fuzz"))


def make_array(seeds: Path, directory: Path, rng: Random) -> None:
    """Writes a packed JSON array, most of them broken before or after they were packed."""
    rows = [json.loads(line) for line in (seeds / "texts.jsonl").read_text().splitlines()]
    data = mutated_json(rows, rng)
    name = f"texts.json.{rng.choice(('gz', 'bz2', 'xz'))}"
    packed = hostile.PACKED[name.rpartition(".")[2]](data)
    (directory / name).write_bytes(mutated_bytes(packed, rng) if rng.random() < 0.4 else packed)


def make_parquet(seeds: Path, directory: Path, rng: Random) -> None:
    path = directory / "texts.parquet"
    hostile.write_parquet_of_one_text(path, rows=rng.choice((30, 3000)), characters=rng.choice((9, 9000)))
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((0, 1, 1, 3))):  # mostly in the footer, which is most of the file
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def make_sparse(seeds: Path, directory: Path, rng: Random) -> None:
    """Writes a long line, packed or with a hole, or an array with a header of its own."""
    match rng.randrange(3):
        case 0:
            place = directory / f"texts.jsonl.{rng.choice(('gz', 'bz2', 'xz'))}"
            unit = rng.choice((b"x", b"[", b"[],", b'{"text":'))
            hostile.write_packed(place, mebibytes=130, unit=unit, head=rng.choice((b"", b'{"text": "a"}\n')))
        case 1:
            head = rng.choice((b"", b'{"text": "a"}\n'))
            hostile.write_sparse(directory / "texts.jsonl", 1 << 28, head=head)
        case _:
            shape = rng.choice(("(-5,)", "(8, 8)", "(2,)", "()", f"({2**62},)", f"({2**31}, {2**31})"))
            kind = rng.choice(("<u2", "|u1", "|O", "<f8"))
            header = f"{{'descr': '{kind}', 'fortran_order': {rng.random() < 0.2}, 'shape': {shape}, }}"
            hostile.write_npy(directory / "tokens.npy", header)


def make_bomb(seeds: Path, directory: Path, rng: Random) -> None:
    """Writes a template or a tokenizer that writes too much."""
    if rng.random() < 0.98:
        settings = hostile.hostile_template(rng.choice(MEMORY_TEMPLATES), directory)
    else:
        settings = hostile.hostile_tokenizer("replace", directory)
    (directory / "settings.json").write_text(
        json.dumps({**settings, "sequence_length": rng.randrange(1, 99)})
    )


def read_bomb(directory: Path) -> None:
    settings = json.loads((directory / "settings.json").read_text())
    build_data(Run.parse({"data": {**settings, "cache": str(directory / "cache")}}, source="fuzz"))


def read_records_of_any_file(directory: Path) -> None:
    """Reads a file as a worker does, but in this process, whose limits are those of the fuzzing."""
    (path,) = directory.iterdir()
    if path.suffix == ".npy":
        read_tokens(directory)
        return
    kind: RecordKind = "parquet" if path.suffix == ".parquet" else "jsonl"
    for part in split_file(kind, SourceFile(str(path), path.stat().st_size)):
        for record in read_records(part, DataSourceFields()):
            if isinstance(record.value, DataError):
                raise DataError(record.where())


# --- records of a run, hardware ----------------------------------------------------------------------------


def make_records(seeds: Path, directory: Path, rng: Random) -> None:
    """Breaks one record of a run: a line of a file that grows, or a whole file."""
    shutil.copytree(seeds / "run", directory / "run")
    path = rng.choice(sorted(one for one in (directory / "run").rglob("*") if one.is_file()))
    if path.suffix == ".jsonl":
        lines = path.read_bytes().splitlines(keepends=True)
        at = rng.randrange(len(lines))
        lines[at] = mutated_json(json.loads(lines[at]), rng) + b"\n"
        path.write_bytes(b"".join(lines))
    elif path.suffix == ".gz":
        data = mutated_json(json.loads(gzip.decompress(path.read_bytes())), rng)
        path.write_bytes(
            mutated_bytes(gzip.compress(data), rng) if rng.random() < 0.2 else gzip.compress(data)
        )
    else:
        path.write_bytes(mutated_json(json.loads(path.read_bytes()), rng))


def read_run_records(directory: Path) -> None:
    run = directory / "run"
    commands = (["report"], ["report", "--json"], ["report", "--html", f"{run}.html"])
    for words in (*commands, ["trace", "--out", f"{run}.json"]):
        if main([*words, str(run)]) == 1:  # an error that was not foreseen
            raise AssertionError(f"fullshard {words} ended with exit code 1")


def make_hardware(seeds: Path, directory: Path, rng: Random) -> None:
    (directory / "hardware.toml").write_bytes(mutated_lines((seeds / "hardware.toml").read_text(), rng))


def read_hardware(directory: Path) -> None:
    hardware = hardware_on(str(directory / "hardware.toml"))
    search(decoder_spec(SHAPE), hardware, run_for(SHAPE, "train.global_batch=64"))


TARGETS = {
    "manifest": Target(partial(make_checkpoint, MANIFEST), read_checkpoint),
    "table of pieces": Target(partial(make_checkpoint, "__0_0.distcp"), read_checkpoint),
    "index of shards": Target(partial(make_checkpoint, SHARDS), read_checkpoint),
    "metadata": Target(make_metadata, read_checkpoint),
    "checkpoint files": Target(make_files, read_checkpoint),
    "safetensors": Target(make_safetensors, open_pretrained_files),
    "weights index": Target(make_weights_index, open_pretrained_files),
    "config.json": Target(make_config, read_model),
    "run.toml": Target(partial(make_lines, "run.toml"), lambda directory: Run.load(directory / "run.toml")),
    "plan.json": Target(
        partial(make_tree, "plan.json"), lambda directory: Plan.load(directory / "plan.json")
    ),
    "convert": Target(make_converted, read_converted),
    "tokenizer": Target(make_tokenizer, read_tokenizer),
    "memmaps": Target(make_tokens, read_tokens),
    "texts": Target(make_texts, read_texts),
    "records of a run": Target(make_records, read_run_records),
    "hardware.toml": Target(make_hardware, read_hardware),
    "packed arrays": Target(make_array, read_records_of_any_file),
    "parquet": Target(make_parquet, read_records_of_any_file),
    "long lines": Target(make_sparse, read_records_of_any_file),
    "bombs": Target(make_bomb, read_bomb),
}

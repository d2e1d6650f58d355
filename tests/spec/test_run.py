"""Keys and values of a run.toml, and refusals of others."""

import tomllib
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fullshard.errors import SpecError
from fullshard.spec.run import STRATEGY_ALIASES, Run, Strategy, parse_strategy
from fullshard.spec.settings.foreign_names import FOREIGN_NAMES, REMOVED
from fullshard.spec.value import iterate_dotted_field_names

NAMES = {**STRATEGY_ALIASES, **{str(strategy): strategy for strategy in Strategy}}

_OVERRIDE = "sharding.units.overrides.0.reshard_after_forward"


def parsed(text: str) -> Run:
    return Run.parse(tomllib.loads(text), source="run.toml")


@given(st.sampled_from(sorted(NAMES)), st.data())
def test_strategy_names_are_known_in_any_spelling(name, data):
    spelled = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name)
    spelled = "".join(data.draw(st.sampled_from("-_")) if c == "_" else c for c in spelled)
    if spelled.lower().startswith("zero"):
        spelled = spelled[:4] + data.draw(st.sampled_from(["", "-", "_"])) + spelled[4:]
    assert parse_strategy(data.draw(st.sampled_from(["", "_"])) + spelled) is NAMES[name]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("[optimizer]\nlr = 1e-3", "optimizer.learning_rate"),
        ("lr = 1e-3", "optimizer.learning_rate"),
        ("[train]\nbatch_size = 8", "train.global_batch"),
        ("[train]\ngradient-accumulation-steps = 8", "train.microbatch × ranks × accumulated"),
        ("[training]\nmax_steps = 8", "train"),
        ("[train]\nmax_steps = 8", "train.steps"),
        ("[model]\nseq_len = 8", "data.sequence_length"),
        ("[model]\nmin_lr_ratio = 0.1", "schedule.min_lr_ratio"),
        ("[train]\ndtype = 'bf16'", "precision.mode or data.dtype"),
        ("[zero_optimization]\nstage = 3", "sharding.strategy"),
    ],
)
def test_a_name_that_other_trainers_use_is_answered_with_the_key(written: str, meant: str):
    with pytest.raises(SpecError) as raised:
        parsed(written)
    assert meant in (raised.value.fix or "")


def test_settings_that_are_suggested_for_names_of_other_tools_exist():
    keys = {"model.hf", "sharding.units", *iterate_dotted_field_names(Run)}
    for answer in set(FOREIGN_NAMES.values()) - {"fullshard train --resume"}:
        named = [word.strip(",") for word in answer.split() if "." in word]
        assert named, answer
        assert set(named) <= keys
    assert not REMOVED.keys() & keys


def test_a_run_without_a_file_is_the_default():
    assert Run.load() == Run() == parsed("")


def test_file_and_overrides_replace_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[train]\nsteps = 7\n[sharding]\nstrategy = "ZeRO-2"\n')
    run = Run.load(path, overrides=["train.steps=9", "sharding.units.min_parameters=10000000"])
    assert run.train.steps == 9
    assert run.sharding.strategy is Strategy.SHARD_GRAD_OP
    assert run.sharding.units.min_parameters == 10000000
    assert run.tokens_per_step == run.train.global_batch * run.data.sequence_length


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=500", "train", "steps", 500),
        ("optimizer.learning_rate=1e-4", "optimizer", "learning_rate", 1e-4),
        ("run.dir=runs/two", "run", "dir", "runs/two"),
        ('run.dir="runs/two"', "run", "dir", "runs/two"),
        ("model.tied=true", "model", "tied", True),
        ("log.trackers=['wandb']", "log", "trackers", ("wandb",)),
        ("sharding.strategy = hsdp", "sharding", "strategy", Strategy.HYBRID_SHARD),
        ("run.dir=a=b", "run", "dir", "a=b"),
    ],
)
def test_overrides_take_toml_values_and_plain_words(override, section, key, value):
    extra = ["sharding.shard_degree=2"] if "hsdp" in override else []
    assert getattr(getattr(Run.load(overrides=[override, *extra]), section), key) == value


def test_the_last_override_holds():
    assert Run.load(overrides=["train.steps=1", "train.steps=2"]).train.steps == 2


def test_a_duration_is_steps_or_epochs_and_an_override_replaces_either():
    with pytest.raises(SpecError, match="steps = 7 and epochs = 2 exclude each other"):
        parsed("[train]\nsteps = 7\nepochs = 2")
    run = parsed("[train]\nepochs = 2.5")
    assert (run.train.steps, run.train.epochs) == (None, 2.5)
    with pytest.raises(SpecError, match="number of steps is not known"):
        _ = run.train.step_count
    assert run.with_overrides(["train.steps=30"]) == Run()
    assert (
        Run.load(overrides=["train.steps=3", "train.epochs=2.5"])
        == run
        == Run.model_validate(run.model_dump())
    )


@pytest.mark.parametrize("override", ["train.steps", "steps=5", "=5", "train.=5", "run.dir.deeper=1"])
def test_an_override_that_names_no_key_is_refused(override):
    with pytest.raises(SpecError, match=r"run\.dir|section\.key=value"):
        Run.load(overrides=["run.dir=x", override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 1", "try: train"),
        ("[train]\nstep = 1", "try: train.steps"),
        ("[train]\nlearning_rate = 1", "try: optimizer.learning_rate"),
        ("[sharding]\nmin_parameters = 9", "try: sharding.units.min_parameters"),
        ("[sharding.units]\nnamse = []", "try: sharding.units.names"),
        ("[sharding.units]\npolicy = 'size'", "try: sharding.units.names, or min_parameters"),
        ('[precision]\noutput_dtype = "fp32"', "try: train.loss, a function"),
        ("[sharding]\nreshard_after_forward = 2", 'try: sharding.strategy = "hybrid_shard" with'),
        ("[checkpoint]\nstorage = 'per_node'", "try: checkpoint.dir, a directory that all nodes share"),
        ("[prefetch]\nmode = 'none'", "try: nothing instead: FSDP2 gathers one unit ahead"),
        ("[[sharding.units.overrides]]\nmtach = 'x'", "try: sharding.units.overrides.0.match"),
        ("[data]\nevery = 1", "try: ema.every or checkpoint.every or log.every"),
        ("steps = 1", "try: train.steps"),
        ("[run]\nxyzzy = 1", "try: one of dir, seed, device"),
        ("[train]\nstep = 1\nspeed = 2", "(and 1 more)"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(text, message):
    with pytest.raises(SpecError) as raised:
        parsed(text)
    assert message in str(raised.value)
    assert "unknown key" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("[train]\nsteps = 0", "train.steps", "greater than 0"),
        ("[run]\ndevice = 'mps'", "run.device", "torch.mps has no streams"),
        ("[log]\ntrackers = 'wandb'", "log.trackers", 'it is a list\n  try: ["wandb"]'),
        ("[train]\nsteps = 'many'", "train.steps", "integer"),
        ("train = 3", "train", "dictionary"),
        ("[optimizer]\nlearning_rate = inf", "optimizer.learning_rate", "finite"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas.1", "less than 1"),
        ("[data]\nvalidation_fraction = 1.0", "data.validation_fraction", "less than 1"),
        ("[data]\nsource = 'text'", "data", 'paths = ["data/*.txt"]'),
        ("[data]\npaths = ['a.txt']", "data", 'set source = "text"'),
        ("[data]\nsequence_length = 4096", "the combination of settings", "model.max_sequence = 2048"),
        ("[model]\nheads = 3", "model", "must divide d_model"),
        ("[model]\nkv_heads = 3", "model", "must divide heads"),
        ("[model]\nd_model = 4", "model", "even head size"),
        ("[sharding]\nstrategy = 'zero4'", "sharding.strategy", "full_shard"),
        ("[sharding]\nstrategy = 'full_shard'\nshard_degree = 2", "sharding", "hybrid"),
        ("[sharding.units]\nnames = ['a']\nmin_parameters = 9", "sharding.units", "exclude each other"),
        ("[precision]\nmode = 'int8'", "precision.mode", "bf16"),
        ("[recompute]\nmode = 'none'\nblocks = 2", "recompute", 'needs mode = "full" or "selective"'),
        (
            "[[sharding.units.overrides]]\nmatch = 'x'\nreshard_after_forward = 'no way'",
            _OVERRIDE,
            "it is one of true, false",
        ),
        ("[run]\nranks = -1", "run.ranks", "greater than or equal to 0"),
        ("[run]\ncompile = 'maybe'", "run.compile", "why: it is one of true, false, auto"),
        ("[train]\nloss_chunk = 'abc'", "train.loss_chunk", "why: it is auto or an integer"),
        ("[train]\nloss_chunk = -1", "train.loss_chunk", "why: it is auto or greater than or equal to 0"),
        ("[data]\ndocument_mask = 'no way'", "data.document_mask", "why: it is one of true, false"),
        ("[precision]\nfp8_min_features = 8", "precision.fp8_min_features", "greater than or equal to 16"),
    ],
)
def test_an_impossible_value_is_refused_with_its_key_and_the_reason(text, key, why):
    with pytest.raises(SpecError) as raised:
        parsed(text)
    assert str(raised.value).startswith(f"run.toml: {key} is not valid")
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"steps = ", "it is not TOML: Invalid value (at line 1, column 9)"),
        (b"\xff\xfe", "it is not text (UTF-8): byte 0"),
        (b"[a]\n[a]", "it is not TOML: Cannot declare ('a',) twice (at line 2, column 3)"),
        (b"[train]\nsteps = 1\nsteps = 2", "it is not TOML: Cannot overwrite a value (at line 3, column 10)"),
        (b"[train]\nsteps = 99999999999999999999", "train.steps is an integer of more than 64 bits"),
        (b"steps = " + b"9" * 5000, "it has an integer of more than 64 bits"),
    ],
)
def test_file_that_is_not_toml_is_refused_with_the_reason(tmp_path, content, said):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"broken\.toml cannot be read") as raised:
        Run.load(path)
    assert raised.value.got == said


def test_error_of_an_override_names_set(tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nsteps = 5\n")
    for override, said in (
        ("train.steps=nan", "--set train.steps is not valid"),
        ("train.stpes=3", "--set: unknown key"),
    ):
        with pytest.raises(SpecError) as raised:
            Run.load(tmp_path / "run.toml", overrides=["run.seed=1", override])
        assert str(raised.value).startswith(said)
        assert "try:" in str(raised.value)
    (tmp_path / "run.toml").write_text("[train]\nsteps = nan\n")
    with pytest.raises(SpecError, match=r"run\.toml: train\.steps is not valid"):
        Run.load(tmp_path / "run.toml", overrides=["run.seed=1"])


def test_a_missing_file_is_refused_with_a_way_to_make_one(tmp_path):
    with pytest.raises(SpecError, match="fullshard init") as raised:
        Run.load(tmp_path / "absent.toml")
    assert raised.value.exit_code == 2


def plain_types(annotation: Any) -> set[Any]:
    inner = [one for one in get_args(annotation) if not isinstance(one, str)]
    return set().union(*map(plain_types, inner)) if inner else {annotation}


def number_keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a run that takes numbers, with a truth value for it."""
    for name, field in type(section).model_fields.items():
        inner, types = getattr(section, name), plain_types(field.annotation)
        if isinstance(inner, BaseModel):
            yield from number_keys(inner, f"{prefix}{name}.")
        elif types & {int, float} and bool not in types:
            yield f"{prefix}{name}={'[true, 0.5]' if isinstance(inner, tuple) else 'true'}"


def test_a_truth_value_is_no_number_in_any_key():
    keys = list(number_keys(Run()))
    assert len(keys) > 50
    for override in keys:
        with pytest.raises(SpecError, match="a number, not true"):
            Run.load(overrides=[override])


@pytest.mark.parametrize(
    ("overrides", "what", "fix"),
    [
        (
            ["model.d_model=64", "model.layers=2", "model.hf=x"],
            "model.d_model does not go with model.hf",
            "leave out model.hf, or model.d_model, model.layers",
        ),
        (
            ["model.hf=x", "model.python=y"],
            "model.python does not go with model.hf",
            "leave out model.hf, or",
        ),
        (["model.weights=none"], "model.weights needs model.hf", "model.hf, or leave out model.weights"),
    ],
)
def test_keys_of_two_kinds_of_model_are_refused(overrides, what, fix):
    with pytest.raises(SpecError) as caught:
        Run.load(overrides=overrides)
    assert what in caught.value.what
    assert str(caught.value.fix).startswith(fix)


@pytest.mark.parametrize("key", ["schedule.warmup_steps", "train.validate_every", "checkpoint.every"])
def test_a_fraction_of_the_steps_is_a_number_of_steps_once_it_is_known(key: str) -> None:
    section, _, name = key.partition(".")
    run = Run.load(overrides=[f"{key}=0.03", "train.steps=150"])
    assert getattr(getattr(run, section), name) == 5, "rounded up"
    epochs = Run.load(overrides=[f"{key}=0.03", "train.epochs=2"])
    assert getattr(getattr(epochs, section), name) == 0.03
    assert getattr(getattr(epochs.with_overrides(["train.steps=150"]), section), name) == 5
    assert getattr(getattr(Run.load(overrides=[f"{key}=0.003", "train.steps=9"]), section), name) == 1
    assert getattr(getattr(Run(), section), name) == getattr(getattr(Run.load(), section), name)
    with pytest.raises(SpecError, match=key):
        Run.load(overrides=[f"{key}=1.5"])

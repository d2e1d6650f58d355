"""The settings that make a run import or execute code from outside fullshard and its dependencies."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.spec.value import FrozenModel

TRACKERS_OF_EXTRAS = ("tensorboard", "wandb", "mlflow")


def _names_optimizer_class(name: str) -> bool:
    return "." in name and not name.startswith("torch.optim.")


def _names_kernel_repository(options: Mapping[str, Any]) -> bool:
    """Returns whether transformers would load kernels, which are code, from a repository `owner/name`."""
    return any(
        _names_kernel_repository(cast(Mapping[str, Any], value))
        if isinstance(value, Mapping)
        else "implementation" in key and "/" in str(value)
        for key, value in options.items()
    )


# Key -> whether a value makes the run run code. A test requires an entry for each setting that may.
CODE_SETTINGS: Mapping[str, Callable[[Any], bool]] = {
    "model.python": bool,
    "model.trust_remote_code": bool,
    "model.attention": lambda name: "/" in name,
    "model.options": _names_kernel_repository,
    "data.factory": bool,
    "data.trust_remote_code": bool,
    "train.loss": bool,
    "optimizer.name": _names_optimizer_class,
    "log.trackers": lambda names: not {*names} <= {*TRACKERS_OF_EXTRAS},
}


def settings_that_run_code(run: Run) -> dict[str, Any]:
    """Returns the settings of `run`, by key, whose values make it run code."""
    found = {key: _setting(run, key) for key in CODE_SETTINGS}
    return {key: value for key, value in found.items() if value is not None and CODE_SETTINGS[key](value)}


def check_plan_is_of_run(planned: Run, given: Run, *, plan: str) -> None:
    """Checks the run of a plan file, which may come from anyone, against the settings that the user gave.

    planned: the run in the file `plan`
    given: the run of the user's run.toml and `--set`

    Raises SpecError for a setting that runs code and was not given, and for one that was given otherwise.
    Settings that were left open (`auto`) have the plan's values.
    """
    own = dict(_iterate_given_settings(given))
    for key, value in settings_that_run_code(planned).items():
        if key not in own:
            raise SpecError(
                f"{plan} names code to run, and a plan is not trusted with that.",
                got=f"{key} = {value!r}",
                why="the code would have your permissions, and a plan may come from anyone",
                fix=f"read that code, then fullshard train RUN.toml --plan {plan}, "
                f"with {key} in RUN.toml or in --set too",
            )
    for key, value in own.items():
        if value not in (None, "auto") and _setting(planned, key) != value:
            raise SpecError(
                f"{plan} is the plan of another run.",
                got=f"{key} = {_setting(planned, key)!r}, not {value!r}",
                why="a plan carries the run that it was made for",
                fix="the plan alone; or fullshard plan with these settings and --save",
            )


def _setting(run: Run, key: str) -> Any:
    """Returns the value of `section.key`; None if the section is of a kind that lacks the key."""
    value: Any = run
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _iterate_given_settings(section: FrozenModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of each setting that was given, not left at its default."""
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, FrozenModel):
            yield from _iterate_given_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

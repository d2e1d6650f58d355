"""The files of deploy/ and the commands in recipes/ are checked as far as that goes without a cluster."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from fullshard.spec.run import Run
from tests.command_line import parse_arguments

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
RECIPES = sorted(ROOT.glob("recipes/*.toml"))


def commands(text: str) -> list[list[str]]:
    """Returns the arguments of each `fullshard` and `torchrun` in a script, without comments."""
    joined = re.sub(r"\\\n", " ", text)
    found = re.findall(
        r"(?:^|srun |\{ )((?:fullshard|torchrun) [^|&)\n]*?)(?: &| 2>|$|\))", joined, re.MULTILINE
    )
    return [shlex.split(one) for one in found]


def check_command(arguments: list[str]) -> None:
    if arguments[0] == "torchrun":
        parsed = get_args_parser().parse_args(arguments[1:])
        assert (parsed.module, parsed.training_script) == (True, "fullshard")
        arguments = ["fullshard", *parsed.training_script_args]
    Run.load(overrides=parse_arguments(arguments[1:]).get("overrides", ()))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_batch_script_is_valid_and_its_command_lines_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    assert "Not run on a cluster here" in text
    found = commands(text)
    assert {one[0] for one in found} >= {"fullshard"}
    assert any(one[-2] == "train" or "train" in one for one in found)
    for one in found:
        check_command(one)


def test_the_jobset_names_its_own_pods_and_starts_as_many_ranks_as_it_has_gpus() -> None:
    text = (DEPLOY / "kubernetes-jobset.yaml").read_text(encoding="utf-8")
    assert text.startswith("# Not run here.")
    job = yaml.safe_load(text)
    (workers,) = job["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    arguments = [*container["command"], *container["args"]]
    check_command(arguments)
    parsed = get_args_parser().parse_args(arguments[1:])
    assert int(parsed.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = job["metadata"]["name"]
    assert parsed.rdzv_endpoint.startswith(f"{name}-{workers['name']}-0-0.{name}:")
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in spec["template"]["spec"]["volumes"]}
    grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(container["env"][0]["value"]) < grace, "torchrun ends its ranks before it is killed itself"


def test_the_image_installs_extras_that_the_package_has() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert text.startswith("# Not built here.")
    (extras,) = re.findall(r'"/src\[([a-z0-9,]+)\]"', text)
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [one for one in extras.split(",") if f"\n{one} = [" not in known] == []

"""Two hosts, as network namespaces, whose link is cut in the middle of a step. Needs root, and `ip`."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.agents import Agents

pytestmark = pytest.mark.long

PORT = 29400
WATCHDOG_SECONDS = 4
SETTINGS = (
    "sharding.strategy=full_shard",
    "checkpoint.every=5",
    "optimizer.name=tests.faults.paced.PacedAdamW",
    "train.steps=100000",
    f"fault_tolerance.watchdog_timeout_seconds={WATCHDOG_SECONDS}",
)


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    link: str

    def within(self) -> tuple[str, ...]:
        """Begins a command on this host, under its name; the process stays the same."""
        named = f'hostname {self.name} && exec "$@"'
        return ("ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh")

    def environment(self) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.link, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link between them; skipped where they cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, and ip")
    number = os.getpid()
    first, second = (
        Host(f"fs{number}{end}", f"10.77.13.{i}", f"v{number}{end}") for i, end in ((1, "a"), (2, "b"))
    )
    try:
        for host in (first, second):
            ip("netns", "add", host.name)
        ip(
            "link",
            "add",
            first.link,
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            "name",
            second.link,
            "netns",
            second.name,
        )
        for host in (first, second):
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
            ip("-n", host.name, "link", "set", host.link, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove(first, second)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield first, second
    remove(first, second)


def remove(*hosts: Host) -> None:
    for host in hosts:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", host.name)


@pytest.fixture
def agents(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Agents]:
    flags = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=cut", "--rdzv-backend=c10d"]
    flags.append(f"--rdzv-endpoint={hosts[0].address}:{PORT}")
    made = Agents(tmp_path / "run", *SETTINGS, flags=flags)
    yield made
    made.kill()


def start(agents: Agents, host: Host, *, keeps_rendezvous: bool) -> None:
    conf = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"
    conf += f",is_host={int(keeps_rendezvous)}"
    flags = (f"--local-addr={host.address}", f"--rdzv-conf={conf}")
    agents.start(*flags, within=host.within(), environment=host.environment())


def test_a_run_whose_link_is_cut_continues_on_one_host_and_later_on_both(
    hosts: tuple[Host, Host], agents: Agents
) -> None:
    here, cut_off = hosts
    start(agents, here, keeps_rendezvous=True)
    start(agents, cut_off, keeps_rendezvous=False)
    agents.wait_for_ranks(2)
    agents.wait_for_step(8)

    ip("-n", here.name, "link", "set", here.link, "down")
    agents.wait_for_ranks(1)
    said = agents.said()
    assert "rank 1 does not answer" in said
    assert f"on {cut_off.name}" in said

    ip("-n", here.name, "link", "set", here.link, "up")
    agents.started[1].kill()
    start(agents, cut_off, keeps_rendezvous=False)
    agents.wait_for_ranks(2)
    agents.stop()
    steps = [line["step"] for line in agents.lines()]
    assert steps == list(range(1, len(steps) + 1))

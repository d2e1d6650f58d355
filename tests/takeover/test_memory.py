"""An import holds at most two parameters in anonymous memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WIDTH = 4096
PARAMETER_BYTES = WIDTH * WIDTH // 2 * 4

PROGRAM = """
import resource, sys, threading, time
from pathlib import Path
from torch import nn
from fullshard.spec.run import Run
from fullshard.takeover.formats import open_foreign_checkpoint
from fullshard.takeover.names import match_names
from fullshard.takeover.write import ImportTarget, make_snapshot, write_checkpoint

def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def watch():
    while not done:
        peaks.append(anonymous_bytes())
        time.sleep(0.002)

source = open_foreign_checkpoint(Path(sys.argv[1]))
target = ImportTarget.of_run(Run.load(sys.argv[2]))
snapshot = make_snapshot(source, match_names(source, target.model), target=target)
before, done, peaks = anonymous_bytes(), False, []
thread = threading.Thread(target=watch)
thread.start()
write_checkpoint(snapshot, sys.argv[3], plan=target.plan)
done = True
thread.join()
print(max(peaks) - before)
"""


class Wide(torch.nn.Module):
    """Two matrices of 32 MiB and a vector; with moments 192 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_anonymous_memory_stays_below_two_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Wide()
    state = {
        name: {
            "exp_avg": torch.randn_like(one),
            "exp_avg_sq": torch.rand_like(one),
            "step": torch.tensor(3.0),
        }
        for name, one in model.named_parameters()
    }
    optimizer = {"state": state, "param_groups": []}
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "source.pt")
    (tmp_path / "run.toml").write_text('[model]\npython = "tests.takeover.test_memory:Wide"\n')
    arguments = [str(tmp_path / name) for name in ("source.pt", "run.toml", "out")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2 * PARAMETER_BYTES + (64 << 20)

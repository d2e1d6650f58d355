"""The smallest use: your own module, your own loop, sharded.

python examples/fsdp_basics.py                               one rank
torchrun --nproc-per-node 2 examples/fsdp_basics.py          two
"""

import torch
from torch import nn

import fullshard as fs


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def main() -> None:
    run = fs.Run.load(overrides=["sharding.strategy=full_shard", "optimizer.learning_rate=1e-3"])
    with fs.process_group() as ranks:
        plan = fs.Plan.from_run(run, world_size=ranks.world_size, device=ranks.device.type)
        with torch.device("meta"):  # no parameter is allocated before it is sharded
            model = Regressor()
        fs.shard(model, plan)
        optimizer = fs.build_optimizer(model, plan)
        if ranks.rank == 0:
            for name, one in model.named_parameters():
                print(name, tuple(one.shape), one.placements, tuple(one.to_local().shape))

        generator = torch.Generator().manual_seed(ranks.rank)  # every rank sees its own samples
        for step in range(60):
            x = torch.randn(32, 8, generator=generator).to(ranks.device)
            loss = (model(x) - x.square().sum(-1, keepdim=True)).square().mean()
            loss.backward()  # gradients come out averaged over ranks, each rank holding its shard
            optimizer.step()
            optimizer.zero_grad()
            if ranks.rank == 0 and step % 20 == 19:
                print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

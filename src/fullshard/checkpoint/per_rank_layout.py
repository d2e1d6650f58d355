"""The layout `ranks`: a file per rank, with its own shards as they lie in memory.

It is the fastest layout, because nothing is planned or exchanged. Only the same ranks, sharded alike, can
load it.
"""

from collections.abc import Mapping

from torch import Tensor

from fullshard.checkpoint import storage
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.manifest import Manifest, SavedFile
from fullshard.checkpoint.shard_file import local_shard
from fullshard.checkpoint.snapshot_reader import ShardReader
from fullshard.distributed.agreement import rank, world_size
from fullshard.errors import CheckpointError, DamagedCheckpointError


def write(tensors: Mapping[str, Tensor], draft: Files, *, held: ShardReader) -> dict[str, SavedFile]:
    """Writes this rank's shards, read through `held`, and returns its files."""
    shards = ((name, (), local_shard(tensor)) for name, tensor in tensors.items())
    _, written = storage.write_shards(draft, _data_file(rank()), shards=shards, held=held)
    return written


def require_same_ranks(files: Files, manifest: Manifest) -> None:
    """Raises CheckpointError unless as many ranks saved the checkpoint as are loading it."""
    if manifest.world_size != world_size():
        raise CheckpointError(
            f"{files} can only be loaded by the ranks that saved it.",
            got=f"saved by {manifest.world_size} ranks, loaded by {world_size()}",
            why='its layout is "ranks": a file for each rank\'s own shards',
            fix=f'{manifest.world_size} ranks; any number loads what checkpoint.layout = "sharded" saves',
        )


def read(receivers: Mapping[str, Tensor], reader: storage.Reader) -> None:
    """Fills this rank's shards from its own file."""
    name = _data_file(rank())
    table = reader.table(name)
    pieces = {piece.name: piece for piece in table.pieces}
    with reader.opened(name) as file:
        for tensor_name, receiver in receivers.items():
            shard, piece = local_shard(receiver), pieces.get(tensor_name)
            if piece is None:
                raise DamagedCheckpointError(f"{reader.files} is damaged.", got=f"no {tensor_name} in {name}")
            if piece.shape != tuple(shard.shape):
                raise CheckpointError(
                    f"{reader.files} can only be loaded by ranks that are sharded as those that saved it.",
                    got=f"{tensor_name} is {list(piece.shape)} there and {list(shard.shape)} here",
                    why='its layout is "ranks": a file for each rank\'s own shards',
                    fix="the strategy that it was saved with (its manifest holds the plan)",
                )
            reader.read_part(file, piece, offsets=(0,) * shard.ndim, target=shard)


def _data_file(rank: int) -> str:
    return f"rank-{rank}.shards"

"""A pool of gloo ranks that tests share: processes that import torch once and are used again and again.

    def everyones_rank(offset: int) -> list[int]:          # at module level: it is pickled by reference
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dist.get_rank() + offset)
        return everyone                                     # plain values or plain CPU tensors

    def test_ranks_are_numbered_in_order(ranks):
        assert ranks(2).run(everyones_rank, 10) == [[10, 11], [10, 11]]

The function runs on every rank inside a fresh world: `dist.get_rank()` works; make subgroups freely. What
the rank that failed first raised is raised in the test, with that rank's traceback as its note. A rank's
environment holds torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
"""

from tests.ranks.pool import Pool, RankFailed, Workers

__all__ = ["Pool", "RankFailed", "Workers"]

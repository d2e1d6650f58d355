"""The rendezvous of one agent and its ranks, without a port that other machines can reach."""

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fullshard.distributed.loopback import LOOPBACK, start_store_on_loopback


class LoopbackRendezvous(RendezvousHandler):
    """A torchelastic rendezvous of a single agent, whose ranks connect to a store on loopback.

    torch's own handlers open a store on every network interface, and unpickle whatever anybody writes there.
    """

    def __init__(self, launch: str) -> None:
        self._launch = launch

    def get_backend(self) -> str:
        return "one machine"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store_of_ranks = start_store_on_loopback()  # lives as long as this agent
        address = RendezvousStoreInfo(LOOPBACK, self._store_of_ranks.port)
        return RendezvousInfo(HashStore(), 0, 1, address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._launch

    def shutdown(self) -> bool:
        return True

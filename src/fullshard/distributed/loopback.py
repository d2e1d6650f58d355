"""Connects groups on demand, and by loopback if all ranks are on this machine.

[Note: who listens where] By default torch's TCPStore listens on every interface, gloo on the address of the
host's name, and NCCL on the first interface that is not loopback. None of them authenticates its peers, and
the messages between ranks are unpickled. So the store gets a socket that is already bound, and gloo and NCCL
get the name of the interface. Other users of this machine reach loopback, too: see docs/restarts.md.

[Note: connected on demand] By default each group of gloo connects every rank with every other: N² reads of
the store, and N sockets per rank. Most groups need few of these: see [Note: rounds] in `rounds`.
"""

import functools
import ipaddress
import os
import socket
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LAZY = "TORCH_GLOO_LAZY_INIT"


def all_ranks_are_local(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if the ranks that torchrun's variables describe are all on this machine.

    This is so if there is only one, if WORLD_SIZE equals LOCAL_WORLD_SIZE, or if MASTER_ADDR is loopback.
    """
    ranks = environment.get("WORLD_SIZE", "1")
    if "RANK" not in environment or ranks in ("1", environment.get("LOCAL_WORLD_SIZE")):
        return True
    address = environment.get("MASTER_ADDR", "")
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name, possibly of another machine
        return False


@contextmanager
def set_connection_variables(environment: MutableMapping[str, str] = os.environ) -> Generator[None]:
    """Makes groups that are created in this context connect on demand, locally by the loopback interface.

    The context sets TORCH_GLOO_LAZY_INIT, so that gloo connects two ranks when they first exchange a message,
    and if all ranks are local, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; unless the user has set them.
    """
    interface = find_loopback_interface() if all_ranks_are_local(environment) else None
    # NCCL treats a name as a prefix, unless an equals sign precedes it.
    wanted = {} if interface is None else {_GLOO: interface, _NCCL: f"={interface}"}
    wanted[_LAZY] = "1"
    ours = {name: value for name, value in wanted.items() if name not in environment}
    environment.update(ours)
    try:
        yield
    finally:
        for name in ours:
            environment.pop(name, None)


def find_loopback_interface() -> str | None:
    """Returns the name of the loopback interface: `lo` on Linux, `lo0` on macOS; None without one."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def start_store_on_loopback(port: int = 0) -> dist.TCPStore:
    """Starts a store that listens at 127.0.0.1:`port` (0: a free port). Raises OSError if that is taken."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
        bound.listen(socket.SOMAXCONN)
        port = bound.getsockname()[1]
        # The store closes the descriptor. `host_name` is where its own client connects, not where it listens.
        descriptor = bound.detach()
    return dist.TCPStore(
        host_name=LOOPBACK, port=port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )


start_store_until_exit = functools.cache(start_store_on_loopback)

"""Pickles are read from workers, or without running them: checkpoints, stores and drives hold none."""

import ast

from tests.architecture.source import package

# (module, call) -> why it runs no code of others.
READERS = {
    ("data.worker", "pickle.load"): "from the pipes between a process and its own worker",
    ("distributed.agreement", "pickle.loads"): "from rank 0, as torch's collectives of objects do",
    ("distributed.rounds", "pickle.loads"): "from the other ranks, as torch's collectives of objects do",
    ("weights.export_state", "torch.load(weights_only=True)"): "of a file that was written just before",
    (
        "takeover.stand_ins",
        "torch.load(weights_only=True)",
    ): "makes tensors, plain values, stand-ins",
    ("training.offload_checkpoint", "torch.load(weights_only=True)"): "makes only tensors and plain values",
}
_READS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "numpy.load", "np.load"}


def reads(call: ast.Call) -> str | None:
    """Returns the name of a call that can read a pickle, with `weights_only` if it is given."""
    name = ast.unparse(call.func)
    given = [ast.unparse(one) for one in call.keywords if one.arg in ("weights_only", "allow_pickle")]
    if name not in _READS or (name.endswith("np.load") and not given):  # numpy reads none unless asked
        return None
    return f"{name}({', '.join(given)})" if given else name


def test_pickles_are_read_only_from_workers_or_without_running_them() -> None:
    found = {
        (name.removeprefix("fullshard."), read)
        for name, module in package().items()
        for node in module.nodes
        if isinstance(node, ast.Call) and (read := reads(node)) is not None
    }
    assert found == set(READERS)
    users = {name for name, module in package().items() for one in module.imports if one.module == "pickle"}
    assert users == {
        "fullshard.data.worker",
        "fullshard.distributed.agreement",
        "fullshard.distributed.rounds",
        "fullshard.checkpoint.storage",  # only writes
        "fullshard.takeover.stand_ins",  # a fixed list of names
    }

"""Imported objects are not searched for cycles again and again."""

import gc
import subprocess
import sys

import pytest

from fullshard.launch.gc import disable_gc

CYCLE = """
class Node:
    def __del__(self):
        print(self.name)

def left(name):
    node = Node()
    node.itself, node.name = node, name

from fullshard.launch.gc import freeze_imports_in_gc
with freeze_imports_in_gc():
    left("within")
left("after")
"""


def test_gc_is_off_in_the_block_and_on_after_it() -> None:
    assert gc.isenabled()
    with disable_gc():
        assert not gc.isenabled()
        with disable_gc():
            pass
        assert not gc.isenabled()
    with pytest.raises(ImportError), disable_gc():
        raise ImportError
    assert gc.isenabled()


def test_only_objects_made_after_the_imports_are_searched_at_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CYCLE], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout == "after\n"

"""Information that a hanging process reports about itself: its threads' stacks and its last collective."""

import json
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from types import FrameType
from typing import Any

from fullshard.torch_private.groups import dump_flight_recorders

# Parts of the paths of files in which a thread waits for other ranks.
_IN_COLLECTIVES = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    f"{os.sep}fullshard{os.sep}distributed{os.sep}",
)


def thread_frames(thread: int) -> list[FrameType]:
    """Returns the frames of a thread, innermost first, or an empty list if the thread has ended."""
    innermost = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return [frame for frame, _ in traceback.walk_stack(innermost)] if innermost is not None else []


def is_in_collective(thread: int) -> bool:
    """Returns whether a thread's innermost frame is in torch.distributed or fullshard's own collectives."""
    frames = thread_frames(thread)
    return bool(frames) and any(part in frames[0].f_code.co_filename for part in _IN_COLLECTIVES)


def user_frame_text(thread: int) -> str:
    """Returns `file:line in function` of a thread's innermost frame, outside libraries if there is one."""
    frames = thread_frames(thread)
    libraries = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    near = [frame for frame in frames if not frame.f_code.co_filename.startswith(libraries)] or frames
    if not near:
        return "nowhere in Python"
    code = near[0].f_code
    return f"{code.co_filename}:{near[0].f_lineno} in {code.co_name}"


def other_thread_ids() -> list[int]:
    """Returns the identifiers of all threads except the calling one."""
    own = threading.get_ident()
    return [thread for thread in sys._current_frames() if thread != own]  # pyright: ignore[reportPrivateUsage]


def all_stacks_text() -> str:
    """Returns the stacks of all threads except fullshard's own, each with its innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: list[str] = []
    for thread in other_thread_ids():
        if names.get(thread, "").startswith("fullshard "):
            continue
        lines.append(f"  thread {names.get(thread, thread)}")
        for frame in reversed(thread_frames(thread)):
            code = frame.f_code
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            lines.append(f"    {code.co_filename}:{frame.f_lineno} in {code.co_name}: {line}")
    return "\n".join(lines)


def last_collective_text() -> str:
    """Describes the newest unfinished collective in torch's flight recorder, or else the newest.

    For example, `gloo:all_reduce 17 of default_pg [10] Double`; "" if this torch records none.
    """
    entries = _flight_recorder_entries()
    pending = [entry for entry in entries if not entry.get("retired", True)]
    newest = max(pending or entries, key=lambda entry: entry.get("time_created_ns", 0), default=None)
    if newest is None:
        return ""
    group = "/".join(str(part) for part in newest.get("process_group", ())[1:])
    sizes = " ".join(str(size) for size in newest.get("input_sizes", ()))
    dtypes = " ".join(newest.get("input_dtypes", ()))
    text = f"{newest.get('profiling_name')} {newest.get('collective_seq_id')} of {group} {sizes} {dtypes}"
    return " ".join(text.split())


def _flight_recorder_entries() -> list[dict[str, Any]]:
    try:
        return [entry for text in dump_flight_recorders() for entry in json.loads(text).get("entries", [])]
    except (RuntimeError, ValueError):
        return []

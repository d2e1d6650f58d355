"""The place in the code where an exception was raised."""

import sysconfig
import traceback
from pathlib import Path


def error_location_text(error: BaseException) -> str:
    """Returns `file:line in function` of the innermost frame of the user's code, else of fullshard's."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "unknown"
    ours = str(Path(__file__).parents[1])
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    near = [frame for frame in frames if frame.filename.startswith(ours)]
    near = [f for f in frames if not f.filename.startswith((ours, "<", *libraries))] or near or [*frames]
    return f"{near[-1].filename}:{near[-1].lineno} in {near[-1].name}"

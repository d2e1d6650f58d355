"""Names of settings in other trainers and in earlier versions, for the errors that name the right key."""

from pathlib import Path

from fullshard.system.small_files import read_toml

_NAMES = read_toml(Path(__file__).with_suffix(".toml"))
REMOVED: dict[str, str] = _NAMES.pop("removed")
"""Key of an earlier version -> what replaces it."""
FOREIGN_NAMES: dict[str, str] = {name: answer for answer, names in _NAMES.items() for name in names.split()}

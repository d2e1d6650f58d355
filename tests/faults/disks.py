"""File systems that can be cut off, filled and taken away. They need root, and are skipped without."""

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# linux/fs/ext4/ext4.h: _IOR("X", 125, __u32); NOLOGFLUSH leaves the journal unwritten too.
_IOC_SHUTDOWN = 0x8004587D
_NOLOGFLUSH = 2


class PowerlessDisk:
    """An ext4 file system on a loop device, whose power can be cut: what was not flushed is gone."""

    def __init__(self, directory: Path) -> None:
        self.image, self.mounted_at = directory / "disk.img", directory / "disk"
        self.mounted_at.mkdir()
        with self.image.open("wb") as file:
            file.truncate(96 << 20)
        _run("mkfs.ext4", "-q", "-F", str(self.image))
        self.plug_in()

    def plug_in(self) -> None:
        _run("mount", "-o", "loop", str(self.image), str(self.mounted_at))

    def cut(self) -> None:
        """From now on nothing reaches the disk, and nothing that is in memory will."""
        descriptor = os.open(self.mounted_at, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _IOC_SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """As after the power came back. Nobody may have a file open there."""
        self.unplug()
        self.plug_in()

    def unplug(self) -> None:
        _run("umount", str(self.mounted_at))


@contextmanager
def powerless_disk(directory: Path) -> Generator[PowerlessDisk]:
    _require_root("mkfs.ext4")
    try:
        disk = PowerlessDisk(directory)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        with suppress(subprocess.CalledProcessError):
            disk.unplug()


@contextmanager
def small_disk(directory: Path, *, size_bytes: int) -> Generator[Path]:
    """A tmpfs of so many bytes."""
    _require_root("mount")
    directory.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be mounted here: {error.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        _run("umount", "-l", str(directory))


def remount(directory: Path, options: str) -> None:
    _run("mount", "-o", f"remount,{options}", str(directory))


def _require_root(tool: str) -> None:
    if os.geteuid() != 0 or shutil.which(tool) is None:
        pytest.skip("needs root, and a loop device or tmpfs")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

"""The disk of a disturbed run: a small file system of its own, which fills up and loses power."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

from thinwire.checkpoint.durable import sync
from thinwire.errors import UsageError

_BYTES: Final = 96 << 20
_TRIES: Final = 200
"""Attempts at a copy of the device during which nothing was written to it."""

_UNIT: Final = 4096

_FILLER: Final = "filler"

_CLONE_NEWNS: Final = 0x00020000
"""A mount namespace of one's own, in Linux's ``unshare``."""


def can_mount() -> bool:
    """Whether this user may mount file systems, and the machine has loop devices."""
    return os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None


class Disk:
    """An ext4 file system on a loop device, whose blocks are a file; or a plain directory where nothing can be mounted.

    It is mounted for this process and those that it starts. Whatever ends them, SIGKILL included, unmounts it, and the
    loop device goes with the mount.

    Args:
        path: Where it is mounted; its image lies beside it.
        mounts: Whether to mount one.
    """

    def __init__(self, path: Path, *, mounts: bool) -> None:
        self.path = path
        self._image = path.with_suffix(".img")
        self._device: str | None = None
        self._mounts = mounts

    def __enter__(self) -> Disk:
        self.path.mkdir(parents=True, exist_ok=True)
        if self._mounts:
            with self._image.open("wb") as file:
                file.truncate(_BYTES)
            # No blocks are kept back for root: a full disk is full for this user, too.
            _call("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
            self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        if self._mounts:
            self._unmount()
            self._image.unlink(missing_ok=True)

    def fill(self, leave: int) -> None:
        """Fill the disk until about ``leave`` bytes stay free."""
        with (self.path / _FILLER).open("wb") as file:
            while (free := shutil.disk_usage(self.path).free) > leave:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), max(_UNIT, (free - leave) // 2))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break  # what is left is too little for the file system's own records

    def free(self) -> None:
        """Make room again, durably: a loss of power would bring the filler back."""
        (self.path / _FILLER).unlink(missing_ok=True)
        sync(self.path)

    def photograph(self) -> None:
        """Copy the blocks of the device as they are at one moment, without what the system has not written yet.

        Whoever writes to the disk has been stopped. The system itself may still write what they have left in memory;
        the copy counts once no write has come between its begin and its end.

        Raises:
            UsageError: The device is never still.
        """
        copy = self._image.with_suffix(".copy")
        for _ in range(_TRIES):
            before = self._activity()
            shutil.copyfile(self._image, copy)
            if before == self._activity():
                return
            time.sleep(0.01)
        raise UsageError(f"{self._device} is written to without end")

    def lose_power(self) -> None:
        """Go on with the blocks of the photograph: nobody uses the disk any more."""
        self._unmount()
        self._image.with_suffix(".copy").rename(self._image)
        self._mount()

    def _activity(self) -> tuple[str, str]:
        """Counts of the device's writes, and of those under way."""
        place = Path("/sys/block") / Path(self._device or "").name
        words = (place / "stat").read_text().split()
        return " ".join(words[4:8]), (place / "inflight").read_text()

    def _mount(self) -> None:
        _leave_mounts()
        self._device = _call("losetup", "--find", "--show", str(self._image)).strip()
        try:
            _call("mount", "-t", "ext4", self._device, str(self.path))
        finally:
            # A device that is mounted goes with its mount, and another at once.
            _call("losetup", "--detach", self._device)

    def _unmount(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(UsageError):
                _call("umount", str(self.path))
                return
            time.sleep(0.05)  # a process that was killed may still be leaving
        raise UsageError(f"{self.path} is still in use")


@functools.cache
def _leave_mounts() -> None:
    """Let this process have mounts of its own, which nobody else sees and which end with it and those it starts.

    Raises:
        UsageError: It may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise UsageError(f"no file system can be mounted: {os.strerror(ctypes.get_errno())}")
    _call("mount", "--make-rslave", "/")


def _call(*command: str) -> str:
    """Run a program of the system.

    Raises:
        UsageError: It failed; says how.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout

"""Standard streams that are closed, or whose disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def open_closed_streams() -> None:
    """Open what the caller has closed of descriptors 0 to 2 on the null device. Otherwise the next file or socket gets
    the number, and whatever prints writes into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, also in ranks
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115, for the life of the process


@contextlib.contextmanager
def output_may_fail() -> Iterator[None]:
    """Turn output that the disk has no room for into a sentence on stderr and exit status 1."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the interpreter writes the rest at its exit
        with contextlib.suppress(OSError):
            print(f"thinwire: the output cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from error

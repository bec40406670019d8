"""Checkpoints that are written while training goes on.

:meth:`BackgroundWriter.start` copies this rank's chunks to host memory and returns. A thread then writes the copy with
:func:`~thinwire.checkpoint.store.write`, so that everything that holds for a save that training waits for holds here
too: the checkpoint appears whole or not at all, and ranks succeed or fail together. The thread's exchanges are those of
a control group of its own; they never meet the exchanges of the computing thread.

A rank writes one checkpoint at a time, and its copy has the size of what it saves. The memory of the copy is kept, as
fresh memory costs several times the copy itself.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final, final

import torch

from thinwire.agreement import Typed, all_gather_typed, describe
from thinwire.checkpoint import store
from thinwire.checkpoint.manifest import Json
from thinwire.checkpoint.storage import Chunk, ShardedVector

__all__ = ["BackgroundWriter", "PendingSave"]

log = logging.getLogger("thinwire")

_FLAG: Final[Typed[bool]] = Typed(bool)

_ALIGNMENT: Final = 64
"""Bytes; a chunk begins at a multiple of it in the copy."""


@final
class PendingSave(Future[None]):
    """A checkpoint that is being written.

    A ``concurrent.futures.Future`` without a value, as ``torch.distributed.checkpoint.async_save`` returns one. All
    ranks end alike: ``result()`` returns on all of them once the checkpoint is complete, or raises the same
    :class:`~thinwire.errors.CheckpointError` on all of them. It exchanges nothing, so a rank may ask alone.

    Attributes:
        path: Directory of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._asked = False
        self.set_running_or_notify_cancel()  # a save cannot be cancelled on one rank only

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: Seconds to wait at most; ``None`` waits for as long as it takes.

        Raises:
            CheckpointError: A rank has failed, and there is no such checkpoint.
            CollectiveError: A rank does not answer.
            TimeoutError: The checkpoint is not complete after ``timeout`` seconds.
        """
        try:
            super().result(timeout)
        finally:
            self._asked = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error with which the save ended, ``None`` if it succeeded; waits as :meth:`result` does."""
        try:
            return super().exception(timeout)
        finally:
            self._asked = self.done()

    @property
    def failed(self) -> bool:
        """Whether the save has ended with an error."""
        return self.done() and super().exception() is not None

    def unheard(self) -> BaseException | None:
        """The error of a save that has ended, if nobody has asked for it."""
        return None if self._asked or not self.done() else super().exception()


@final
class BackgroundWriter:
    """Writes checkpoints one after another, each in a thread.

    Args:
        control: The ranks that save. Nothing else uses this group.
    """

    def __init__(self, control: store.ControlGroup) -> None:
        self._control = control
        self._memory = _HostMemory()
        self._thread: threading.Thread | None = None
        self._save: PendingSave | None = None
        atexit.register(self._report)  # after all threads have ended

    def start(
        self,
        path: str | os.PathLike[str],
        vectors: Mapping[str, ShardedVector],
        values: Mapping[str, Json],
        *,
        then: Callable[[], None] | None = None,
    ) -> PendingSave:
        """Copy the vectors, and begin to write them. Waits for the save before. All ranks call this in the same order.

        Args:
            path: See :func:`~thinwire.checkpoint.store.write`, as for the others.
            vectors: Free to change once this has returned.
            values: Free to change once this has returned.
            then: What the thread does once the checkpoint is complete. If it fails, the log says so: the checkpoint is
                complete all the same.

        Returns:
            The save.
        """
        self.join()
        copies, wait = self._memory.copy(vectors)
        kept = copy.deepcopy(dict(values))
        save = self._save = PendingSave(Path(path))

        def write() -> None:
            try:
                wait()
                store.write(path, copies, kept, control=self._control)
            except BaseException as error:  # whatever it is, somebody waits for the save to end
                save.set_exception(error)
                return
            save.set_result(None)
            try:
                if then is not None:
                    then()
            except Exception as error:
                log.error("%s: saved, but what was to be done afterwards failed: %s", path, describe(error))

        self._thread = threading.Thread(target=write, name="thinwire-checkpoint")
        self._thread.start()
        return save

    def join(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def settle(self, control: store.ControlGroup) -> None:
        """Wait until no checkpoint is being written, and raise the error of the last one if nobody asked for it.
        Collective.

        Args:
            control: The same ranks, for the exchanges of the calling thread.

        Raises:
            CheckpointError: On all ranks.
        """
        if self._save is None:
            return
        self.join()
        error, self._save = self._save.unheard(), None
        # If a rank has asked, the program knows of the failure, even if the other ranks did not ask.
        unheard: list[bool] = all_gather_typed(control, error is not None, _FLAG)
        if error is not None and all(unheard):
            raise error

    def _report(self) -> None:
        """Log the error of the last save if nobody asked for it."""
        if self._save is not None and (error := self._save.unheard()) is not None:
            log.error("%s", error)

    def close(self) -> None:
        """Wait until no checkpoint is being written, log its error if nobody asked for it, and free the memory."""
        self.join()
        self._report()
        atexit.unregister(self._report)
        self._save = None
        self._memory = _HostMemory()


class _HostMemory:
    """Memory of the host for copies of chunks, kept from one copy to the next."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, vectors: Mapping[str, ShardedVector]) -> tuple[dict[str, ShardedVector], Callable[[], None]]:
        """Copy the chunks.

        Args:
            vectors: By key; their chunks may be on devices.

        Returns:
            The same vectors, whose chunks lie in this memory until the next copy, and a function that waits until
            devices have copied theirs. Work that is queued on a device afterwards does not change the copy.
        """
        chunks = [chunk for vector in vectors.values() for chunk in vector.chunks]
        devices = {chunk.tensor.device for chunk in chunks if chunk.tensor.is_cuda}
        size = sum(_aligned(chunk.tensor.numel() * chunk.tensor.itemsize) for chunk in chunks)
        if self._bytes.numel() != size or self._bytes.is_pinned() != bool(devices):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed before as much is allocated again
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        begin = 0
        copies: dict[str, ShardedVector] = {}
        for key, vector in vectors.items():
            of_key = []
            for chunk in vector.chunks:
                end = begin + chunk.tensor.numel() * chunk.tensor.itemsize
                place = self._bytes[begin:end].view(chunk.tensor.dtype)
                of_key.append(Chunk(chunk.offset, place.copy_(chunk.tensor, non_blocking=True)))
                begin += _aligned(end - begin)
            copies[key] = ShardedVector(vector.numel, tuple(of_key))
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return copies, wait


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

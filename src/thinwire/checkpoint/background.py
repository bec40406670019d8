"""Checkpoints that are written while training goes on.

:meth:`BackgroundWriter.start` copies this rank's chunks to host memory and returns. A thread then writes the copy with
:func:`~thinwire.checkpoint.store.write`, so that everything that holds for a save that training waits for holds here
too: the checkpoint appears whole or not at all, and ranks succeed or fail together. The thread's exchanges are those of
a control group of its own; they never meet the exchanges of the computing thread.

A rank writes one checkpoint at a time, and its copy has the size of what it saves. The memory of the copy is kept, as
fresh memory costs several times the copy itself. It is locked in its place where devices copy to it while training goes
on.

A file system may hang: a network mount whose server is gone answers no call, and no error comes either. A save with a
limit is given up then. All ranks agree on that, nothing of it appears later, and its thread is left behind in the call
that does not return. As long as it stays there, further saves fail at once.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import torch

from thinwire.agreement import Ranks, Typed, all_gather_typed, describe
from thinwire.checkpoint import store
from thinwire.checkpoint.bases import Base
from thinwire.checkpoint.storage import Chunk, ShardedVector
from thinwire.checkpoint.strict_json import Json
from thinwire.errors import CheckpointError

log = logging.getLogger("thinwire")

_FLAG: Final[Typed[bool]] = Typed(bool)

_TEXT: Final[Typed[str]] = Typed(str)

_GRACE: Final = 1.0
"""Seconds in which a thread that waits for other ranks ends once its exchange is aborted."""

_ALIGNMENT: Final = 64
"""Bytes; a chunk begins at a multiple of it in the copy."""


StreamsOf = Callable[[torch.device], Any]
"""The streams of a device, see :class:`thinwire.collectives.links.streams.Streams`; ``None`` for a device without any,
whose memory the host reads itself."""


@final
class PendingSave(Future[None]):
    """A checkpoint that is being written.

    A ``concurrent.futures.Future`` without a value, as ``torch.distributed.checkpoint.async_save`` returns one. All
    ranks end alike: ``result()`` returns on all of them once the checkpoint is complete, or raises the same
    :class:`~thinwire.errors.CheckpointError` on all of them. It exchanges nothing, so a rank may ask alone.

    Attributes:
        path: Directory of the checkpoint.
        limit: Seconds that it may take; ``None`` for as long as it takes.
    """

    def __init__(self, path: Path, limit: float | None = None) -> None:
        super().__init__()
        self.path, self.limit = path, limit
        self._began = time.monotonic()
        self._asked = False
        self.set_running_or_notify_cancel()  # a save cannot be cancelled on one rank only

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: Seconds to wait at most; ``None`` waits for as long as it takes.

        Raises:
            CheckpointError: A rank has failed, and there is no such checkpoint. Or the save takes longer than its
                limit; the next save or load then tells all ranks where it hangs.
            CollectiveError: A rank does not answer.
            TimeoutError: The checkpoint is not complete after ``timeout`` seconds.
        """
        left = self.left
        limited = left is not None and (timeout is None or left < timeout)
        try:
            super().result(left if limited else timeout)
        except TimeoutError:
            if self.done() or not limited:
                raise
            raise CheckpointError(f"{self.path}: not saved after {self.limit:g} s, which is the limit") from None
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
        """Whether the save has ended with an error, or takes longer than its limit."""
        return super().exception() is not None if self.done() else self.left == 0

    @property
    def left(self) -> float | None:
        """Seconds until its limit; ``None`` if it has none."""
        return None if self.limit is None else max(0.0, self._began + self.limit - time.monotonic())

    def unheard(self) -> BaseException | None:
        """The error of a save that has ended, if nobody has asked for it."""
        return None if self._asked or not self.done() else super().exception()


@final
class BackgroundWriter:
    """Writes checkpoints one after another, each in a thread.

    Args:
        control: The ranks that save. Nothing else uses this group.
        streams_of: The streams of the devices whose memory is saved.
        abort: Ends the exchanges of that group that are under way.
    """

    def __init__(self, control: Ranks, streams_of: StreamsOf, abort: Callable[[], None] = lambda: None) -> None:
        self._control, self._abort = _Watched(control), abort
        self._streams_of, self._memory = streams_of, _HostMemory(streams_of)
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
        limit: float | None = None,
        copies: bool = True,
        base: Base | None = None,
    ) -> PendingSave:
        """Copy the vectors, and begin to write them, once :meth:`finish` has returned. All ranks call this in the same
        order.

        Args:
            path: See :func:`~thinwire.checkpoint.store.write`, as for the others.
            vectors: Free to change once this has returned.
            values: Free to change once this has returned.
            then: What the thread does once the checkpoint is complete. If it fails, the log says so: the checkpoint is
                complete all the same.
            limit: Seconds that the save may take before :meth:`finish` gives it up; ``None`` for as long as it takes.
            copies: False if the caller waits for the save, so that the vectors need not be copied.
            base: Its vectors are free to change as well.

        Returns:
            The save.
        """
        assert self._thread is None, "a checkpoint is being written"
        shared = {} if base is None or base.vectors is None else base.vectors
        everything = {**vectors, **shared}
        taken = self._memory.copy(everything) if copies else everything
        if base is not None and base.vectors is not None:
            base = replace(base, vectors={key: taken[key] for key in shared})
        own = {key: taken[key] for key in vectors}
        wait = _end_of(everything, self._streams_of)
        kept = copy.deepcopy(dict(values))
        save = self._save = PendingSave(Path(path), limit)

        def write() -> None:
            try:
                wait()
                store.write(path, own, kept, control=self._control, unless=self._control.check_wanted, base=base)
            except BaseException as error:  # whatever it is, somebody waits for the save to end
                save.set_exception(error)
                return
            save.set_result(None)
            try:
                if then is not None:
                    then()
            except Exception as error:
                log.error("%s: saved, but what was to be done afterwards failed: %s", path, describe(error))

        # The interpreter waits for a thread before it ends, unless it is a daemon; this one may never return.
        self._thread = threading.Thread(target=write, name="thinwire-checkpoint", daemon=limit is not None)
        self._thread.start()
        return save

    @property
    def given_up(self) -> bool:
        """Whether the last save took longer than its limit; the writer is then of no more use."""
        return self._control.given_up

    @property
    def hangs(self) -> bool:
        """Whether the thread of a save that was given up still runs."""
        return self.given_up and self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait until no checkpoint is being written, or the one that is takes longer than its limit."""
        if self._thread is not None:
            self._thread.join(None if self._save is None else self._save.left)
            if not self._thread.is_alive():
                self._thread = None

    def finish(self, control: Ranks) -> None:
        """Wait until no checkpoint is being written, and raise the error of the last one if nobody asked for it.
        Collective.

        Args:
            control: The same ranks, for the exchanges of the calling thread.

        Raises:
            CheckpointError: On all ranks, also if the save takes longer than its limit on one of them.
        """
        if self._save is None:
            return
        self.join()
        self._give_up_together(control, self._save)
        error, self._save = self._save.unheard(), None
        # If a rank has asked, the program knows of the failure, even if the other ranks did not ask.
        unheard: list[bool] = all_gather_typed(control, error is not None, _FLAG)
        if error is not None and all(unheard):
            raise error

    def _give_up_together(self, control: Ranks, save: PendingSave) -> None:
        """If a rank is still busy after the limit, no rank completes the save."""
        if save.limit is None:
            return
        mine = "" if self._thread is None else self._control.state  # nothing if the thread has ended
        states: list[str] = all_gather_typed(control, mine, _TEXT)
        if not any(states):
            return
        self._control.given_up = True
        self._abort()  # ranks that wait for one that hangs
        if self._thread is not None:
            self._thread.join(_GRACE)
        self._save = None
        busy = {rank: state for rank, state in enumerate(states) if state not in ("", _Watched.WAITING)} or {
            rank: state for rank, state in enumerate(states) if state
        }
        who = "; ".join(f"rank {rank} {state}" for rank, state in busy.items())
        raise CheckpointError(
            f"{save.path}: cannot save: {who}, after {save.limit:g} s, which is the limit; a network mount may not "
            "answer, or the disk is too slow"
        )

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
        self._memory.free()


@final
class _Watched:
    """A control group that knows whether its thread waits for other ranks, or for the file system."""

    WAITING: Final = "waits for other ranks"
    WRITING: Final = "still waits for the file system"

    def __init__(self, control: Ranks) -> None:
        self._control = control
        self.rank, self.size = control.rank, control.size
        self.state, self.given_up = self.WRITING, False

    def all_gather_bytes(self, message: bytes, /) -> list[bytes]:
        """See :class:`thinwire.agreement.Ranks`."""
        self.state = self.WAITING
        try:
            return self._control.all_gather_bytes(message)
        finally:
            self.state = self.WRITING

    def check_wanted(self) -> None:
        """Refuse to go on with a save that was given up.

        Raises:
            CheckpointError: It was.
        """
        if self.given_up:
            raise CheckpointError("the save has been given up")


class _HostMemory:
    """Memory of the host for copies of chunks, kept from one copy to the next."""

    def __init__(self, streams_of: StreamsOf) -> None:
        self._streams_of = streams_of
        self._bytes, self._unpin = torch.empty(0, dtype=torch.uint8, device="cpu"), _nothing

    @torch.no_grad()
    def copy(self, vectors: Mapping[str, ShardedVector]) -> dict[str, ShardedVector]:
        """The same vectors, whose chunks lie in this memory until the next copy, once the host has waited for what
        their devices have queued. Work that is queued on a device afterwards does not change the copy."""
        chunks = [chunk.tensor for vector in vectors.values() for chunk in vector.chunks]
        self._make_room(sum(_aligned(chunk.nbytes) for chunk in chunks), chunks)
        begin = 0
        copies: dict[str, ShardedVector] = {}
        for key, vector in vectors.items():
            of_key = []
            for chunk in vector.chunks:
                end = begin + chunk.tensor.nbytes
                place = self._bytes[begin:end].view(chunk.tensor.dtype)
                if (streams := self._streams_of(chunk.tensor.device)) is None:
                    place.copy_(chunk.tensor)
                else:
                    streams.send(chunk.tensor, place)
                of_key.append(Chunk(chunk.offset, place))
                begin += _aligned(end - begin)
            copies[key] = ShardedVector(vector.numel, tuple(of_key))
        return copies

    def _make_room(self, size: int, chunks: Sequence[torch.Tensor]) -> None:
        if self._bytes.numel() == size:
            return
        self.free()  # before as much is allocated again
        self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        found = (self._streams_of(chunk.device) for chunk in chunks)
        if (streams := next((each for each in found if each is not None), None)) is not None:
            self._unpin = streams.pin(self._bytes)

    def free(self) -> None:
        """Give the memory back."""
        self._unpin()
        self._bytes, self._unpin = torch.empty(0, dtype=torch.uint8, device="cpu"), _nothing


def _end_of(vectors: Mapping[str, ShardedVector], streams_of: StreamsOf) -> Callable[[], None]:
    """A function that waits for what the devices of these vectors have queued so far."""
    events = []
    for device in {chunk.tensor.device for vector in vectors.values() for chunk in vector.chunks}:
        if (streams := streams_of(device)) is not None:
            event = streams.event()
            event.record(streams.current())
            events.append(event)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def _nothing() -> None:
    """What unlocks memory that is not locked."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

"""The publisher: every rank of a trainer writes what it owns of each version of the weights to a store.

Ranks agree, in one small exchange, on the version that the next one begins from: the last that all of them have
written. Encoding and writing happen in a thread, while training goes on. A store that is slow, full or gone costs
versions, never a step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from thinwire.agreement import Typed
from thinwire.errors import UsageError
from thinwire.program import Axis, Lane
from thinwire.program.wire import rounds_parameters
from thinwire.sharding.checkpointing.stored_parameters import frozen, persistent_buffers
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.weights.parts import Kind, Name, Piece, Values, encode, new_run
from thinwire.weights.stores import Store

__all__ = ["Publisher", "publisher"]

log = logging.getLogger("thinwire")

_RUN: Final[Typed[str]] = Typed(str)

_STATES: Final[Typed[tuple[str, str]]] = Typed(tuple[str, str])
"""State of a rank's last version, and the run of a publisher that has taken over."""


def publisher(model: nn.Module, store: str, *, every: int = 1, anchor_every: int = 50) -> Publisher:
    """Publish the weights of a sharded model, for generators elsewhere that follow by ``thinwire.Subscriber(store)``.

    Collective. Call :meth:`Publisher.step` after every step of the optimizer, and :meth:`Publisher.close` at the end.

    Args:
        model: A sharded model.
        store: A directory, or a URL of fsspec.
        every: Steps from one version to the next.
        anchor_every: Versions from one anchor, which holds all weights, to the next. Other versions hold what has
            changed. Receivers begin at an anchor. Versions before the last anchor but one are removed.

    Raises:
        UsageError: The model is cut by tensor or pipeline parallelism, a number is less than 1, or the store cannot be
            read.
    """
    for name, value in (("every", every), ("anchor_every", anchor_every)):
        if value < 1:
            raise UsageError(f"{name} = {value} should be at least 1")
    return Publisher(runtime_of(model), Store(store), every, anchor_every)


@dataclass(frozen=True)
class _Version:
    """A version as this rank holds it.

    Attributes:
        number: Its number.
        step: Optimizer steps that made it.
        pieces: This rank's pieces.
        values: Their values.
        is_anchor: Whether it is published as an anchor, too.
    """

    number: int
    step: int
    pieces: list[Piece]
    values: Values
    is_anchor: bool


class Publisher:
    """Publishes versions; see :func:`publisher`.

    Attributes:
        version: The last version that all ranks have begun to write; 0 before the first.
        skipped: Versions that were left out, because the store was slow or could not be written.
        nbytes: Bytes that this rank has written.
        error: Why the last version of this rank could not be written; ``None`` if it was.
    """

    def __init__(self, runtime: Runtime, store: Store, every: int, anchor_every: int) -> None:
        if runtime.shares is None:
            raise UsageError("publisher(): the model is cut by tp or pp, and versions are of whole tensors")
        self._runtime, self._store, self._every, self._anchor_every = runtime, store, every, anchor_every
        self._ranks = runtime.control
        self.version = self.skipped = self.nbytes = 0
        self.error: str | None = None
        self._steps = 0
        self._base: _Version | None = None  # the last version that all ranks have written
        self._begun: _Version | None = None  # the one after it
        self._anchors: list[int] = []  # versions that all ranks have written anchors of
        self._mine: list[Name] = []  # parts of this rank in the store
        self._thread: threading.Thread | None = None
        self._newer: str | None = None  # the run of another publisher that has taken over
        self._ended = False
        self._run = max(self._ranks.agree(self._begin_run, _unreadable, _RUN))

    def step(self) -> None:
        """Publish the weights if it is their turn. Collective. Returns while they are being written."""
        self._steps += 1
        if self._steps % self._every or self._ended:
            return
        states = self._ranks.all_gather_typed((self._state(), self._newer or ""), _STATES)
        if any(state == "busy" for state, _ in states):
            self.skipped += 1
            return
        if newer := max(run for _, run in states):
            log.warning("another publisher, %s, writes to %s: this one has stopped", newer, self._store.url)
            self._ended = True
            return
        self._take_up(written=all(state == "written" for state, _ in states))
        self.version += 1
        is_anchor = self._base is None or self.version - self._anchors[-1] >= self._anchor_every
        self._begun = _Version(self.version, self._runtime.num_steps, *self._snapshot(), is_anchor)
        arguments = self._begun, self._base
        self._thread = threading.Thread(target=self._write, args=arguments, name="thinwire publisher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the last version is written."""
        if self._thread is not None:
            self._thread.join()
        self._ended = True

    def _begin_run(self) -> str:
        return new_run(self._store.names()) if self._ranks.rank == 0 else ""

    # -- what ranks have written -------------------------------------------------------------------------------

    def _state(self) -> str:
        if self._thread is not None and self._thread.is_alive():
            return "busy"
        return "failed" if self.error is not None else "written"

    def _take_up(self, *, written: bool) -> None:
        """Go on from the version that was begun, if all ranks have written it; else from the one before."""
        if self._begun is None:
            return
        if written:
            self._base = self._begun
            if self._begun.is_anchor:
                self._anchors.append(self._begun.number)
        else:
            self.skipped += 1
            log.warning("version %d was not published: %s", self._begun.number, self.error or "another rank has failed")
        self._begun = None

    # -- what this rank owns -----------------------------------------------------------------------------------

    def _snapshot(self) -> tuple[list[Piece], Values]:
        """This rank's pieces, and a copy of their values."""
        pieces: dict[str, list[Piece]] = {}
        values: dict[str, list[torch.Tensor]] = {}
        for name, shape, offset, value in self._owned():
            dtype = str(value.dtype).removeprefix("torch.")
            pieces.setdefault(dtype, []).append(Piece(name, tuple(shape), dtype, offset, value.numel()))
            values.setdefault(dtype, []).append(value.detach().reshape(-1))
        joined = {dtype: torch.cat(tensors).cpu() for dtype, tensors in values.items()}
        return [piece for of_dtype in pieces.values() for piece in of_dtype], joined

    def _owned(self) -> Iterator[tuple[str, torch.Size | tuple[int, ...], int, torch.Tensor]]:
        """Names, shapes and offsets of what this rank publishes, with the values that forwards compute with."""
        runtime, sharded = self._runtime, self._runtime.sharded
        assert runtime.masters is not None
        runtime.masters.flush()
        if rounds_parameters(runtime.plan) or not runtime.plan.residence.on_device:
            runtime.join_spreads()  # until then, this rank does not hold what it owns as others get it
        first_replica = sharded.axes[Axis.REPLICA, Lane.SYNC].index == 0
        for owned in sharded.fragments if first_replica else ():
            slot = owned.fragment.slot
            yield slot.name, slot.shape, owned.fragment.offset, owned.held
        assert runtime.shares is not None
        if first_replica and sharded.axes[Axis.SHARD, Lane.REDUCE].index == 0:
            for name, _, offset, value in frozen(sharded):
                yield name, runtime.shares[name].spec.shape, offset, value
        if sharded.rank == 0:
            for name, value in persistent_buffers(sharded.model):
                yield name, value.shape, 0, value

    # -- the thread --------------------------------------------------------------------------------------------

    def _write(self, begun: _Version, base: _Version | None) -> None:
        self.error = None
        try:
            if self._ranks.rank == 0 and (newer := self._newer_run()):
                self._newer = newer
                return
            if base is not None:
                self._put(begun.number, base.number, encode(begun.step, begun.pieces, base.values, begun.values))
            if begun.is_anchor:
                self._put(begun.number, 0, encode(begun.step, begun.pieces, None, begun.values))
            self._remove_old()
        except Exception as error:  # whatever it is, training goes on
            self.error = f"{type(error).__name__}: {error}"

    def _newer_run(self) -> str | None:
        """The run of a publisher that has begun later to write to the store."""
        return max((name.run for name in self._store.names() if name.run > self._run), default=None)

    def _put(self, version: int, parent: int, content: bytes) -> None:
        kind: Kind = "delta" if parent else "anchor"
        name = Name(self._run, version, parent, kind, self._ranks.rank, self._ranks.size)
        self._store.write(str(name), content)
        self._mine.append(name)
        self.nbytes += len(content)

    def _remove_old(self) -> None:
        """Remove this rank's parts of what nobody begins from any more."""
        while len(self._anchors) > 1 and self._mine[0].version < self._anchors[-2]:
            self._store.remove(str(self._mine[0]))
            del self._mine[0]


def _unreadable(problems: Mapping[int, str]) -> UsageError:
    return UsageError(f"publisher(): the store cannot be read: {next(iter(problems.values()))}")

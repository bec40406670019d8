"""The publisher: every rank of a trainer writes what it owns of each version of the weights to a store.

Ranks agree, in one small exchange, on the version that the next one begins from: the last that all of them have
written. Encoding and writing happen in a thread, while training goes on. A store that is slow, full or gone costs
versions, never a step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from thinwire.agreement import Typed
from thinwire.collectives.job.control import Control
from thinwire.errors import UsageError
from thinwire.parallel import ParallelModel
from thinwire.sharding.checkpointing.names import stored
from thinwire.sharding.checkpointing.stored_parameters import persistent_buffers
from thinwire.sharding.modules.quantized import is_packed
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.units import whole
from thinwire.weights.owned import snapshot
from thinwire.weights.parts import Kind, Name, Piece, Values, encode, new_run, wanted
from thinwire.weights.stores import Store

log = logging.getLogger("thinwire")

_RUN: Final[Typed[tuple[str, int]]] = Typed(tuple[str, int])

_NAMES: Final[Typed[list[str]]] = Typed(list[str])

_State = tuple[str, str, bool]
"""State of a rank's last version, the run of a publisher that has taken over, whether receivers need an anchor."""

_STATES: Final[Typed[_State]] = Typed(_State)

_ROUND: Final = 10.0
"""Seconds that a rank waits for its last version before it tells others how far it is."""

_ROUNDS: Final = 60
"""Rounds after which the last version is given up."""


def publisher(
    model: nn.Module | ParallelModel,
    store: str,
    *,
    every: int = 1,
    anchor_every: int = 50,
    fold_every: int = 8,
    prefix: str = "",
) -> Publisher:
    """Publish the weights of a sharded model, for generators elsewhere that follow by ``thinwire.Subscriber(store)``.

    Collective. Call :meth:`Publisher.step` after every step of the optimizer, and :meth:`Publisher.close` at the end.

    Args:
        model: A sharded model, or one that ``thinwire.parallelize`` has cut.
        store: A directory, or a URL of fsspec.
        every: Steps from one version to the next.
        anchor_every: Versions from one anchor, which holds all weights, to the next. Other versions hold what has
            changed. Receivers begin at an anchor. Versions before the last anchor but one are removed.
        fold_every: Versions after an anchor from one rung to the next. A rung is published as a delta from the rung
            before it, too, for receivers that are behind: half of the bytes of the eight deltas in between, which are
            sent in addition. 0 publishes none, for a thin link from the trainer and receivers that keep up.
        prefix: What names begin with here and not where they are published, for a model that is a module of another:
            ``"model."``.

    On the host, a rank keeps up to three versions of what it owns: the one being written, the last, and the last rung.

    Raises:
        UsageError: A number is too small, the store cannot be read, the plan has elastic islands, no name begins with
            the prefix, or it does not end with a dot, or two tensors would get one name.
    """
    every, anchor_every = whole("every", every), whole("anchor_every", anchor_every)
    fold_every = whole("fold_every", fold_every, 0)
    parts = model.chunks if isinstance(model, ParallelModel) else [model]
    runtimes = [runtime_of(part) for part in parts]
    if runtimes[0].plan.is_elastic:
        raise UsageError("publisher(): with islands.elastic, jobs have weights of their own: set it to false")
    _refuse_packed(runtimes)
    if prefix != "":
        _check_prefix(prefix, parts, runtimes[0].control)
    return Publisher(runtimes, Store(store), every, anchor_every, fold_every, prefix)


@dataclass(frozen=True)
class _Version:
    """A version as this rank holds it: the pieces and values of this rank after so many steps of the optimizer. It may
    be published as an anchor, too, or as a delta from the rung before it."""

    number: int
    step: int
    pieces: list[Piece]
    values: Values
    is_anchor: bool
    is_rung: bool


class Publisher:
    """Publishes versions; see :func:`publisher`.

    Attributes:
        version: The last version that all ranks have begun to write; 0 before the first. No earlier publisher whose
            versions were in the store has used the number.
        skipped: Versions that were left out, because the store was slow or could not be written.
        nbytes: Bytes that this rank has written.
        error: Why the last version of this rank could not be written; ``None`` if it was.
    """

    def __init__(
        self, runtimes: Sequence[Runtime], store: Store, every: int, anchor_every: int, fold_every: int, prefix: str
    ) -> None:
        self._runtimes, self._store, self._prefix = runtimes, store, prefix
        self._every, self._anchor_every, self._fold_every = every, anchor_every, fold_every
        self._ranks = runtimes[0].control
        self.version = self.skipped = self.nbytes = 0
        self.error: str | None = None
        self._steps = 0
        self._base: _Version | None = None  # the last version that all ranks have written
        self._begun: _Version | None = None  # the one after it
        self._rung: _Version | None = None  # the last anchor, or the last rung after it
        self._anchors: list[int] = []  # versions that all ranks have written anchors of
        self._mine: list[Name] = []  # parts of this rank in the store
        self._thread: threading.Thread | None = None
        self._newer = ""  # the run of another publisher that has taken over
        self._wanted = self._anchor_wanted = False  # whether receivers need an anchor: says this rank, says any
        self._left_out = False  # whether the weights of the last step are in no version
        self._ended = self._is_alone = False
        first = self._ranks.rank == 0
        runs = self._ranks.agree(lambda: new_run(store.checked().names()) if first else ("", 0), _unreadable, _RUN)
        self._run, self._earlier = max(runs)  # the last version of publishers before this one

    def step(self) -> None:
        """Publish the weights if it is their turn. Collective. Returns while they are being written."""
        self._steps += 1
        self._left_out = True
        if self._steps % self._every == 0 and not self._ended and self._settle(self._exchange()):
            self._begin()

    def close(self) -> None:
        """Wait until the last version is written, for ten minutes at most. Collective: if it is not that of the last
        step, or could not be written, one more is published, so that receivers end with the last weights."""
        if not self._ended and self._finish() and self._left_out:
            self._begin()
            self._finish()
        self._ended = True

    def _finish(self) -> bool:
        """Wait until all ranks have written, and settle. Ranks that have meet in rounds, as no exchange may last as
        long as a slow store takes."""
        for _ in range(_ROUNDS):
            if self._thread is not None:
                self._thread.join(_ROUND)
            states = self._exchange()
            if not _are_busy(states):
                return self._settle(states)
        log.warning("version %d was not published: %s has not taken it in time", self.version, self._store.url)
        return self._settle(states)

    def _exchange(self) -> list[_State]:
        return self._ranks.all_gather_typed((self._state(), self._newer, self._wanted), _STATES)

    def _settle(self, states: Sequence[_State]) -> bool:
        """Take up what became of the version that was begun; returns whether the next one can begin."""
        if _are_busy(states):
            self.skipped += 1
            return False
        if newer := max(run for _, run, _ in states):
            log.warning("another publisher, %s, writes to %s: this one has stopped", newer, self._store.url)
            self._ended = True
            return False
        self._take_up(written=all(state == "written" for state, _, _ in states))
        self._anchor_wanted = any(wanted for _, _, wanted in states)
        return True

    def _begin(self) -> None:
        """Begin to write a version."""
        self._left_out = False
        self.version = 1 + max(self.version, self._earlier)
        is_due = self._base is None or self.version - self._anchors[-1] >= self._anchor_every
        is_anchor = is_due or self._anchor_wanted
        fold = self._fold_every
        is_rung = fold > 0 and not is_anchor and self._rung is not None and self.version - self._rung.number >= fold
        self._begun = _Version(
            self.version, self._runtimes[0].num_steps, *snapshot(self._runtimes, self._prefix), is_anchor, is_rung
        )
        arguments = self._begun, self._base, self._rung
        self._thread = threading.Thread(target=self._write, args=arguments, name="thinwire publisher", daemon=True)
        self._thread.start()

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
            if self._fold_every and (self._begun.is_anchor or self._begun.is_rung):
                self._rung = self._begun
        else:
            self._left_out = True
            self.skipped += 1
            log.warning("version %d was not published: %s", self._begun.number, self.error or "another rank has failed")
        self._begun = None

    # -- the thread --------------------------------------------------------------------------------------------

    def _write(self, begun: _Version, base: _Version | None, rung: _Version | None) -> None:
        self.error = None
        try:
            if self._ranks.rank == 0:
                self._newer = max((name.run for name in self._store.names() if name.run > self._run), default="")
                if self._newer:
                    return
                self._wanted |= self._store.remove(wanted(self._run))
            with self._dispensable(begun):  # first, as the store may need the room
                self._remove_old()
            if base is not None and base.pieces == begun.pieces:
                self._put(begun, base)
            elif not begun.is_anchor:
                self._wanted = True
                self.error = (
                    "tensors, or what ranks own of them, have changed (unfreezing?): the next version is an anchor"
                )
                return
            if begun.is_anchor:
                self._put(begun, None)
                self._wanted = False
        except Exception as error:  # whatever it is, training goes on
            self.error = f"{type(error).__name__}: {error}"
            return
        if begun.is_rung and rung is not base:
            with self._dispensable(begun):
                self._put(begun, rung)

    @contextlib.contextmanager
    def _dispensable(self, version: _Version) -> Iterator[None]:
        """Warn of an error in what receivers can do without."""
        try:
            yield
        except Exception as error:
            log.warning("version %d: %s: %s", version.number, type(error).__name__, error)

    def _put(self, version: _Version, parent: _Version | None) -> None:
        """Write this rank's part of a delta, or without a parent of an anchor."""
        content = encode(version.step, version.pieces, None if parent is None else parent.values, version.values)
        begins = 0 if parent is None else parent.number
        kind: Kind = "anchor" if parent is None else "delta"
        name = Name(self._run, version.number, begins, kind, self._ranks.rank, self._ranks.size)
        self._store.write(str(name), content)
        self._mine.append(name)
        self.nbytes += len(content)

    def _remove_old(self) -> None:
        """Remove this rank's parts of what nobody begins from any more, and all files of publishers before this one."""
        if self._ranks.rank == 0 and self._anchors and not self._is_alone:
            self._store.remove_before(self._run)
            self._is_alone = True
        while len(self._anchors) > 1 and self._mine[0].version < self._anchors[-2]:
            self._store.remove(str(self._mine[0]))
            del self._mine[0]


def _are_busy(states: Sequence[_State]) -> bool:
    return any(state == "busy" for state, _, _ in states)


def _check_prefix(prefix: str, models: Sequence[nn.Module], ranks: Control) -> None:
    """Check that names can be told apart without their prefix. Collective, as stages have names of their own.

    Raises:
        UsageError: They cannot, or the prefix is none; on every rank.
    """
    mine = [stored(name) for model in models for name, _ in (*model.named_parameters(), *persistent_buffers(model))]
    names = [name for theirs in ranks.all_gather_typed(mine, _NAMES) for name in theirs]
    begin = {name for name in names if isinstance(prefix, str) and name.startswith(prefix)}
    if names and not begin:
        raise UsageError(f"prefix = {prefix!r}: no name of the model begins with it; they look like {names[0]!r}")
    if begin and not prefix.endswith("."):
        raise UsageError(f"prefix = {prefix!r} has no dot at its end: give a module's name and a dot, as 'model.'")
    if doubled := {name.removeprefix(prefix) for name in begin} & (set(names) - begin):
        name = min(doubled)
        raise UsageError(
            f"prefix = {prefix!r}: {prefix}{name} would be published as {name}, which is the name of another tensor: "
            "rename one of them, or publish without the prefix"
        )


def _refuse_packed(runtimes: Sequence[Runtime]) -> None:
    for unit in (unit for runtime in runtimes for unit in runtime.units):
        for buffer in unit.buffers:
            for slot, parameter in buffer.named:
                if is_packed(parameter):
                    raise UsageError(
                        f"publisher(): {slot.name} holds codes of bitsandbytes, whose scales are no tensors of the "
                        "model and would not be published: quantize with torchao, or save the adapters"
                    )


def _unreadable(problems: Mapping[int, str]) -> UsageError:
    return UsageError(f"publisher(): the store cannot be read: {next(iter(problems.values()))}")

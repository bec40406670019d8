"""What islands agreed on about a part of the model, and the outer optimizer's step from there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.all_reduce import Feedback, all_reduce, feedback_spans
from thinwire.collectives.messages import Residual
from thinwire.collectives.moves import Moves
from thinwire.collectives.reduce_scatter import EXACT
from thinwire.collectives.topology import AxisGroup
from thinwire.collectives.visible_mean import visible_mean
from thinwire.program import Axis, ExchangePart, Lane
from thinwire.program.islands import ALIGNED
from thinwire.program.wire import shortening
from thinwire.sharding.memory.layout import Run
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.step.sharded_model import ShardedModel


class PartState:
    """The vector of this rank's shares that a fragment exchanges with one codec, or without.

    Where several ranks of an island own the same shares, each keeps the state of an equal piece of the vector.

    Attributes:
        part: Description of the vector.
        sources: The flat buffers, and the runs of their P shards that this rank owns.
        anchor: Values after the last outer step, fp32, ``[length / replicas]``; equal in all islands.
        momentum: The outer optimizer's momentum, of the same size; ``None`` without momentum.
        lost: What this rank's message and its piece of the mean left out, fp32; ``None`` where there is none.
    """

    def __init__(self, sharded: ShardedModel, part: ExchangePart) -> None:
        assert sharded.plan.islands is not None
        self.part, self._settings, self._codecs = part, sharded.plan.islands, sharded.codecs.outer
        buffers = [buffer for unit in part.units for buffer in sharded.units[unit].buffers if buffer.layout.trainable]
        exchanged = [buffer for buffer in buffers if buffer.layout.encoded is part.encoded]
        self.sources = [(buffer, buffer.shares[sharded.share]) for buffer in exchanged]
        self._masters = [piece for buffer, runs in self.sources for piece in _masters(buffer, runs)]
        self._device = sharded.device  # masters may live on the host
        self._replicas = replicas = sharded.axes.get((Axis.REPLICA, Lane.OUTER))  # ranks that own the same shares
        count, index = (1, 0) if replicas is None else (replicas.size, replicas.index)
        self._piece = slice(part.length // count * index, part.length // count * (index + 1))
        self.anchor = self._packed()[self._piece].clone()
        self.momentum = torch.zeros_like(self.anchor) if self._settings.outer.momentum else None
        self.lost: list[torch.Tensor | None] = [None, None]
        self._values: torch.Tensor | None = None

    @property
    def begin(self) -> int:
        """First element of the vector that this rank keeps the state of."""
        return self._piece.start

    def exchange(self, group: AxisGroup, seed: int) -> tuple[torch.Tensor, Moves]:
        """The mean change since the last outer step, fp32, of all islands that take part, in which the ``group`` has
        the ranks of the same position, and the moves that fill it. ``seed`` is for codecs that round at random."""
        change = torch.sub(self.anchor, self._packed()[self._piece])
        if self.part.encoded and self._settings.sends_visible:
            mean, unsent = torch.empty_like(change), self.lost[0]
            unsent = torch.zeros_like(change) if unsent is None else unsent
            self.lost = [unsent, None]
            return mean, visible_mean(group, self.anchor, change, mean, unsent)
        # The islands cut it into equal, aligned pieces.
        change = torch.nn.functional.pad(change, (0, -change.numel() % (ALIGNED * group.size)))
        mean = torch.empty_like(change)
        encoded = self.part.encoded and not shortening(self._settings.codec, "float32").is_none
        feedback = self._feedback(group, encoded, change.numel())
        codecs, scale = self._codecs if encoded else EXACT, 1 / group.size
        moves = all_reduce(group, change, mean, scale=scale, codecs=codecs, feedback=feedback, seed=seed)
        return mean[: self.anchor.numel()], moves

    def gather(self) -> Moves:
        """Gather the values of the outer step inside the island; nothing, if no other rank of it owns the shares."""
        if self._replicas is None:
            return Moves()
        self._values = values = torch.empty(self.part.length, dtype=torch.float32, device=self.anchor.device)

        def place() -> None:
            values[self._piece].copy_(self.anchor)

        return all_gather(self._replicas, values).after(place)

    def finish(self, *, blends: bool = True) -> None:
        """Write the values of the outer step to the masters, of which a share stays as the plan says if ``blends``,
        once the moves have ended."""
        values, self._values = self.anchor if self._values is None else self._values, None
        begin = 0
        for master in self._masters:
            value = values[begin : begin + master.numel()]
            if blends and self._settings.blend:
                master.copy_(torch.lerp(value, master.to(value.device), self._settings.blend))
            else:
                master.copy_(value)
            begin += master.numel()

    def write(self) -> None:
        """Write the anchor to the masters of all ranks that own them, at once."""
        self.gather().perform()
        self.finish(blends=False)

    def step(self, gradient: torch.Tensor) -> None:
        """One step of the outer optimizer, as torch's SGD makes it, by the mean change, which is overwritten."""
        outer, momentum = self._settings.outer, self.momentum
        if momentum is not None:
            momentum.mul_(outer.momentum).add_(gradient)
            gradient = gradient.add_(momentum, alpha=outer.momentum) if outer.name == "nesterov" else momentum
        self.anchor.sub_(gradient, alpha=outer.lr)

    def _packed(self) -> torch.Tensor:
        """The masters, end to end and padded, ``[length]``."""
        vector = torch.zeros(self.part.length, dtype=torch.float32, device=self._device)
        begin = 0
        for master in self._masters:
            vector[begin : begin + master.numel()].copy_(master)
            begin += master.numel()
        return vector

    def _feedback(self, group: AxisGroup, encoded: bool, numel: int) -> Feedback | None:
        if not encoded or not self._settings.error_feedback:
            return None
        own, of_mean = (end - begin for begin, end in feedback_spans(group, numel))
        self.lost = [_sized(self.lost[0], own, self.anchor), _sized(self.lost[1], of_mean, self.anchor, keeps=False)]
        gain = self._settings.error_feedback
        return Feedback(*(None if lost is None else Residual(lost, gain) for lost in self.lost))


def labelled(parts: Iterable[Iterable[PartState]]) -> Iterator[tuple[str, PartState]]:
    """The states of all fragments, each with its fragment and kind as a label for keys."""
    for number, of_fragment in enumerate(parts):
        for state in of_fragment:
            yield f"{number}/{'encoded' if state.part.encoded else 'exact'}", state


def _sized(lost: torch.Tensor | None, numel: int, like: torch.Tensor, *, keeps: bool = True) -> torch.Tensor | None:
    """Rounding errors for another number of islands: those of a rank's own message stay where they are, up to padding;
    those of its piece of the mean belong to other elements then, and are given up."""
    if not numel or (lost is not None and lost.numel() == numel):
        return lost
    sized = torch.zeros(numel, dtype=torch.float32, device=like.device)
    if lost is not None and keeps:
        kept = min(numel, lost.numel())
        sized[:kept].copy_(lost[:kept])
    return sized


def _masters(buffer: FlatBuffer, runs: Sequence[Run]) -> Iterator[torch.Tensor]:
    """The masters of a share, 1-D and fp32, run by run."""
    if buffer.master is not None:
        yield buffer.master
        return
    for run in runs:
        yield buffer.shard[run.start : run.start + run.length]

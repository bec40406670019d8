"""The updates of a run: reads their results, exchanges losses, and ends the run if gradients stay infinite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from thinwire.agreement import Typed
from thinwire.collectives.group import Control
from thinwire.errors import NonFiniteError
from thinwire.sharding.checkpointing.saving import wait_for_writer
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.train.checkpoint import Position, checkpoints

MOST_SKIPPED: Final = 20
"""Give up after this many consecutive non-finite steps."""


@dataclass(frozen=True)
class Update:
    """The result of a step on one rank, before the ranks exchange their losses.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss of this rank's micro-batches, nats per token; 0 on pipeline stages that do not compute it.
        norm: Norm of the gradient over all ranks, without the loss scale.
        lr: Learning rate.
        loss_scale: Factor of the loss in the backward; ``None`` without one.
    """

    step: int
    loss: float
    norm: float
    lr: float
    loss_scale: float | None

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped, because the gradient is not finite."""
        return not math.isfinite(self.norm)


@dataclass
class Updates:
    """The updates of a run on one rank, in order.

    Attributes:
        ranks: The control group of all ranks.
        position: The progress of the run, in which updates are counted.
        scale: The loss scale; ``None`` without one.
        loss_share: Weight of this rank's loss in the mean over all ranks.
        skips: Whether the run goes on after a step that is not finite.
        directory: Directory of the run's checkpoints.
        num_skipped: Updates skipped in a row, up to the last that was counted.
        queue: Steps that the device may still be computing, each as a function that waits for its result.
    """

    ranks: Control
    position: Position
    scale: LossScale | None
    loss_share: float
    skips: bool
    directory: Path
    num_skipped: int = 0
    queue: list[Callable[[], Update]] = field(default_factory=list)

    @contextlib.contextmanager
    def at_floor(self) -> Iterator[None]:
        """Context in which a loss scale that was at its floor in the newest update ends the run."""
        try:
            yield
        except NonFiniteError:
            if not self.queue:
                raise
            self._end(self.queue[-1]())

    def take(self, *, keep_newest: bool) -> list[Update]:
        """Read updates that were not read before, except the newest if asked: the device may not have computed it."""
        due = self.queue[: len(self.queue) - keep_newest]
        del self.queue[: len(due)]
        return [read() for read in due]

    def refuse_skip(self, update: Update, num_skipped: int) -> None:
        """End the run because of a skipped update, unless the recipe or a scale that shrinks excuses it.

        Raises:
            NonFiniteError: On all ranks.
        """
        if self.scale is not None:
            try:
                self.scale.await_update()
            except NonFiniteError:
                self._end(update)
        ends = not self.skips or num_skipped > MOST_SKIPPED
        if ends and (self.scale is None or not self.scale.is_dynamic):
            self._end(update)

    def exchange(
        self, updates: Sequence[Update], words: Sequence[float], ranks: Control | None = None
    ) -> tuple[list[float], list[float]]:
        """Exchange losses and other numbers with some ranks, all by default, and count the updates. Returns the mean
        loss of each update, and the means of the other numbers.

        Raises:
            NonFiniteError: On all ranks, if a loss or a gradient is not finite and the run does not skip such steps.
        """
        shared = [update.loss * self.loss_share if self.loss_share else 0.0 for update in updates]
        means = (ranks or self.ranks).all_reduce_mean([*shared, *words])
        losses = means[: len(updates)]
        for update, loss in zip(updates, losses, strict=True):
            self._count(update, loss)
        return losses, means[len(updates) :]

    def _count(self, update: Update, loss: float) -> None:
        if update.skipped:
            self.num_skipped += 1
            self.position.skipped += 1
            self.refuse_skip(update, self.num_skipped)
        else:
            self.num_skipped = 0
        if not math.isfinite(loss) and not (update.skipped and self.skips):
            self._end(update)  # a smaller loss scale does not change the loss
        if not update.skipped:
            self.position.loss = loss

    def _end(self, update: Update) -> NoReturn:
        losses = self.ranks.all_gather_typed(update.loss, Typed[float](float))
        guilty = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        what = f"the loss of rank {', '.join(guilty)}" if guilty else "the gradient"
        scale = "" if update.loss_scale is None else f", loss scale {update.loss_scale:g}"
        wait_for_writer()  # the checkpoint may be the first one
        remedy = (
            "continue from the last checkpoint with --resume"
            if checkpoints(self.directory)
            else "start again; no checkpoint has been saved yet (checkpoint.every)"
        )
        raise NonFiniteError(
            f"step {update.step}: {what} is not finite (gradient norm {update.norm}{scale}); "
            f"{self._way_out(guilty)}, and {remedy}"
        )

    def _way_out(self, guilty: Sequence[str]) -> str:
        """What to change after a step that is not finite."""
        scale = self.scale
        if guilty or scale is None:
            return 'lower optimizer.lr or set train.on_nonfinite = "skip"'
        if not scale.is_dynamic:
            return f"lower loss_scale.initial = {scale.value:g}, or let the scale shrink with loss_scale.backoff = 0.5"
        return (
            f"the scale is at loss_scale.floor = {scale.floor:g}: lower optimizer.lr, or set plan.compute_dtype to "
            '"bfloat16" or "float32"'
        )


def learning_rate_share(step: int, *, warmup: int, steps: int, final: float) -> float:
    """Linear warm-up, followed by half a period of a cosine, as a fraction of the peak, for the update after ``step``
    others. The first update's is above 0, that of the last warm-up update 1, and that of the last one ``final``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

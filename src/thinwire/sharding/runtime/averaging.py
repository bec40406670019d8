"""Averages the weights of a sharded model, and lets the model compute with the average for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.program.wire import used_codec
from thinwire.sharding.grads.weight_means import WeightMeans
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.units import is_number, whole

APPLIED: Final = "average.applied()"


class Average:
    """An average of the weights of a sharded model, which may have several parts; made by :func:`average`."""

    def __init__(self, runtimes: Sequence[Runtime], decay: float | None, window: int | None) -> None:
        self._runtimes, self._means = runtimes, list[WeightMeans]()
        for runtime in runtimes:
            runtime.join_spreads()
            sharded = runtime.sharded
            runtime.means = WeightMeans(sharded.fragments, decay, window or 1)
            self._means.append(runtime.means)

    @property
    def num_updates(self) -> int:
        """Number of updates so far, those before a loaded checkpoint included."""
        return self._means[0].counts[0]

    @torch.no_grad()
    def update(self) -> None:
        """Let the average follow the weights. Call it after each ``optimizer.step()``, on every rank; nothing travels.

        Raises:
            UsageError: The model computes with the average, or is inside of another block that is for reading.
        """
        for runtime, means in zip(self._runtimes, self._means, strict=True):
            runtime.refuse("average.update()")
            plan, spreads = runtime.plan, runtime.spreads
            if plan.residence.streams_states:
                spreads.join()  # their new values may be on their way to the host
            means.update()  # beside spreads: in this rank's piece they leave what is there

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the average as its weights in this block. Collective.

        Forwards compute with it, and everything that reads weights returns it. Before the first update, it is what the
        weights were when it was made. Buffers, and parameters that were frozen when the model was sharded, stay what
        they are. Afterwards, also after an error, the weights are what they were, bit for bit. Nothing may be
        trained, saved as a checkpoint or loaded in the block.

        Raises:
            UsageError: The model is inside a forward or a backward, or another block is open.
        """
        for runtime in self._runtimes:
            runtime.refuse(APPLIED)
            if runtime.is_inside:
                raise UsageError(f"{APPLIED} inside a forward or a backward of the model: enter it before the forward")
        with contextlib.ExitStack() as stack:
            for runtime, means in zip(self._runtimes, self._means, strict=True):
                stack.enter_context(_applied(runtime, means))
            yield


@contextlib.contextmanager
def _applied(runtime: Runtime, means: WeightMeans) -> Iterator[None]:
    """Let a part of the model have its average as its weights in this block."""
    buffers = [buffer for unit in runtime.units for buffer in unit.buffers if buffer.layout.trainable]
    # With a codec, P shards hold what earlier spreads have left there, which no spread brings back.
    is_exact = used_codec(runtime.plan, "spread").is_none
    with runtime.reading(APPLIED):
        runtime.join_spreads()
        kept = [] if is_exact else [buffer.shard.clone() for buffer in buffers]
        _swap(runtime, means, spread=True)
        try:
            yield
        finally:
            runtime.join_spreads()
            _swap(runtime, means, spread=is_exact)
            for unit in runtime.units if kept else ():
                unit.updated()
            for buffer, shard in zip(buffers if kept else (), kept, strict=True):
                buffer.shard.copy_(shard)


@torch.no_grad()
def _swap(runtime: Runtime, means: WeightMeans, *, spread: bool) -> None:
    means.swap()
    if spread:
        spreads = runtime.spreads
        spreads.write_back(range(len(runtime.units)), differences=True)
        spreads.start(exactly=True)


def average(model: nn.Module, *, decay: float | None = None, window: int | None = None) -> Average:
    """Average the weights of a sharded model over its steps. The average is sharded as the fp32 masters are.

    Each rank averages the masters that it owns, in fp32 and beside them (on the host if they live there): 4 bytes for
    each element, and no exchange. The first weights that the average takes replace what it begins with; this is what
    ``torch.optim.swa_utils.AveragedModel`` does.

    A checkpoint of the model holds the average. To go on with it, make the average before :func:`thinwire.load`, which
    restores it under any plan; the decay or the window may be another. From a checkpoint without an average, it begins
    anew with the weights that were loaded. Each island averages its own weights.

    Args:
        model: A sharded model, which has no average yet.
        decay: Exponential average: an update keeps this share of the average, and takes the rest from the weights; at
            least 0 and below 1.
        window: Uniform average: the mean of the weights at the end of each window of so many updates; with 1, after
            every update.

    Returns:
        The average; call its ``update()`` after each step.

    Raises:
        UsageError: Neither or both of ``decay`` and ``window`` are given, or out of their range, or the model has an
            average.
    """
    return average_of([runtime_of(model)], decay=decay, window=window)


@torch.inference_mode(False)  # its memory is there to be written to
def average_of(runtimes: Sequence[Runtime], *, decay: float | None = None, window: int | None = None) -> Average:
    """The same for the runtimes of a model's parts."""
    if (decay is None) == (window is None):
        raise UsageError(f"average(decay={decay}, window={window}): give one of them, decay = 0.999 or window = 100")
    if decay is not None and not (is_number(decay) and 0 <= decay < 1):
        raise UsageError(f"average(decay={decay!r}): give a number from 0 to below 1, such as 0.999")
    window = None if window is None else whole("window", window)
    if any(runtime.means is not None for runtime in runtimes):
        raise UsageError("average(): the model has an average, and a checkpoint holds one: use the one that was made")
    return Average(runtimes, decay, window)

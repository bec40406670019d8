"""Rules for DeepSpeed's three sizes of a batch, of which any two give the third."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from thinwire.convert.deepspeed_zero import data_parallel_mesh
from thinwire.convert.outcome import Judgement, mapped, refused
from thinwire.convert.source import Rules, Source, whole

_TRAIN: Final = "train_batch_size"
_MICRO: Final = "train_micro_batch_size_per_gpu"
_STEPS: Final = "gradient_accumulation_steps"


@dataclass(frozen=True)
class _Sizes:
    """Sequences of a step over all ranks, of a micro-batch on one rank, and micro-batches of a step; ``None`` where the
    configuration leaves them out."""

    train: int | None
    micro: int | None
    steps: int | None
    world: int

    @classmethod
    def of(cls, source: Source) -> _Sizes:
        values = (source.get(key) for key in (_TRAIN, _MICRO, _STEPS))
        train, micro, steps = (value if isinstance(value, int) and value > 0 else None for value in values)
        return cls(train, micro, steps, data_parallel_mesh(source).ranks)


def _micro(value: int, _source: Source) -> Judgement:
    return mapped(plan={"micro_batch": value}) if value else refused("expected at least 1")


def _accumulation(value: int, _source: Source) -> Judgement:
    return mapped(plan={"micro_batches": value}) if value else refused("expected at least 1")


def _train(value: int, source: Source) -> Judgement:
    """The whole batch gives the size that is left out, as in DeepSpeed; it has to divide evenly."""
    if not value:
        return refused("expected at least 1")
    sizes = _Sizes.of(source)
    product = sizes.world * (sizes.micro or 1) * (sizes.steps or 1)
    if sizes.micro is not None and sizes.steps is not None:
        if value != product:
            return refused(
                f"{_MICRO} = {sizes.micro}, {_STEPS} = {sizes.steps} and {sizes.world} data-parallel ranks make "
                f"{product}; change --nodes and --nproc, or one of the sizes"
            )
        return mapped(note=f"{sizes.micro} x {sizes.steps} on {sizes.world} ranks")
    if value % product:
        return refused(f"{value} is no multiple of {product}, the sequences that {sizes.world} ranks take at once")
    rest = value // product
    return mapped(plan={"micro_batches": rest} if sizes.micro is not None else {"micro_batch": rest})


BATCH_RULES: Final[Rules] = {_TRAIN: whole(_train), _MICRO: whole(_micro), _STEPS: whole(_accumulation)}

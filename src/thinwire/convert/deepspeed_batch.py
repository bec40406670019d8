"""Rules for DeepSpeed's three sizes of a batch, of which any two give the third."""

from __future__ import annotations

from typing import Final

from thinwire.convert.deepspeed_zero import data_parallel_mesh
from thinwire.convert.outcome import Judgement, mapped, refused
from thinwire.convert.source import Rules, Source, at_least_1, to_plan, whole

_TRAIN: Final = "train_batch_size"
_MICRO: Final = "train_micro_batch_size_per_gpu"
_STEPS: Final = "gradient_accumulation_steps"


def _train(value: int, source: Source) -> Judgement:
    """The whole batch gives the size that is left out, as in DeepSpeed; it has to divide evenly."""
    given = (source.get(key) for key in (_MICRO, _STEPS))
    micro, steps = (size if isinstance(size, int) and size > 0 else None for size in given)
    world = data_parallel_mesh(source).ranks
    product = world * (micro or 1) * (steps or 1)
    if micro is not None and steps is not None:
        if value != product:
            return refused(
                f"{_MICRO} = {micro}, {_STEPS} = {steps} and {world} data-parallel ranks make {product}; change "
                "--nodes and --nproc, or one of the sizes"
            )
        return mapped(note=f"{micro} x {steps} on {world} ranks")
    if value % product:
        return refused(f"{value} is no multiple of {product}, the sequences that {world} ranks take at once")
    rest = value // product
    return mapped(plan={"micro_batches": rest} if micro is not None else {"micro_batch": rest})


BATCH_RULES: Final[Rules] = {
    _TRAIN: whole(at_least_1(_train)),
    _MICRO: whole(at_least_1(to_plan("micro_batch"))),
    _STEPS: whole(at_least_1(to_plan("micro_batches"))),
}

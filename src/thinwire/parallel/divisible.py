"""The interface of models that can be split over tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from thinwire.errors import UsageError
from thinwire.sharding.modules.quantized import is_packed, is_wrapper
from thinwire.spec import Plan
from thinwire.spec.cut import keeps_busy


@runtime_checkable
class Divisible(Protocol):
    """A causal language model that can be split.

    Its forward takes token ids, int64 of shape ``(B, T)``, and returns an object with ``logits``. A pipeline stage
    without the embedding takes hidden states ``(B, T, D)`` instead, and a stage without the head returns them.

    Two members are optional: ``cuts_sequences = False`` if the tokens of hidden states cannot be divided, and a method
    ``check_divisible(*, tp, pp)`` that raises if the model cannot be split like this.

    Attributes:
        sequence_ways: Number of tensor-parallel ranks that share the tokens of hidden states; initially 1, set when the
            model is split.
    """

    sequence_ways: int

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks."""

    @property
    def width(self) -> int:
        """Width of the hidden states between blocks, D."""

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, V."""

    @property
    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """Sizes that the number of tensor-parallel ranks must divide, by name."""

    @property
    def is_tied(self) -> bool:
        """Whether the head shares the embedding's weight."""

    def tensor_parallel_styles(self, *, sequence: bool) -> dict[str, ParallelStyle]:
        """torch's style of each module by name; ``*`` stands for the number of a block.

        Args:
            sequence: Whether each rank has only a part of the tokens between matrices, in norms and residuals.
        """

    def tie(self) -> None:
        """Share the weight of head and embedding again, if they are tied."""

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Keep one stage and drop the rest. Names do not change.

        Args:
            blocks: Blocks of the stage.
            first: Whether the stage has the embedding.
            last: Whether the stage has the head.
        """


def divisible(model: object, plan: Plan, *, stages: int) -> Divisible:
    """Return the model if the plan can split it, into so many stages of a pipeline.

    Raises:
        UsageError: The model cannot be split at all.
        SpecError: A size is not divisible; the message names each one.
    """
    if not isinstance(model, Divisible):
        raise UsageError(
            f"{type(model).__name__} cannot be split with tp = {plan.tp}, pp = {plan.pp}: Llama and GPT of thinwire "
            "can, models of transformers in a thinwire.train.models.huggingface.HuggingFaceCausal, and models with the "
            "methods of thinwire.parallel.Divisible; for others use tp = 1 and pp = 1"
        )
    for name, parameter in model.named_parameters() if plan.tp > 1 and isinstance(model, nn.Module) else ():
        if is_wrapper(parameter) or is_packed(parameter):
            raise UsageError(
                f"parameter {name} is a quantized {type(parameter).__name__}, and tp = {plan.tp} cuts plain tensors: "
                "set tp = 1 and divide the model by pp, or shard it by params"
            )
    if (check := getattr(model, "check_divisible", None)) is not None:
        check(tp=plan.tp, pp=plan.pp)
    problems = [
        f"tp = {plan.tp} should divide the model's {name} = {size}"
        for name, size in model.tensor_parallel_sizes.items()
        if size % plan.tp
    ]
    if model.num_blocks < stages:
        problems.append(f"pp = {plan.pp} makes {stages} stages of {model.num_blocks} blocks; use fewer stages")
    if stages > 1 and model.is_tied:
        problems.append(
            f"pp = {plan.pp} puts the embedding and the head on different ranks, but they share one weight; use "
            "tied_embedding = false, or pp = 1"
        )
    if plan.pp > 1 and plan.micro_batches < plan.pp:
        problems.append(f"micro_batches = {plan.micro_batches} should be at least pp = {plan.pp}, or stages stand idle")
    elif not keeps_busy(plan.pp, plan.pipeline_schedule, plan.micro_batches):
        problems.append(
            f"micro_batches = {plan.micro_batches} should be a multiple of {plan.micro_batches // plan.pp} with "
            f"pipeline_schedule = 'interleaved' and pp = {plan.pp}; a multiple of pp always is"
        )
    if problems:
        raise plan.unsuitable(*problems)
    return model


def blocks_of_stages(blocks: int, stages: int) -> list[range]:
    """Distribute consecutive blocks over the stages as evenly as possible."""
    return [range(i * blocks // stages, (i + 1) * blocks // stages) for i in range(stages)]

"""What a model must know of itself to be cut over tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch.distributed.tensor.parallel import ParallelStyle

from thinwire.errors import SpecError, UsageError
from thinwire.spec import Plan
from thinwire.spec.pipeline import keeps_busy

__all__ = ["Divisible", "blocks_of_stages", "divisible"]


@runtime_checkable
class Divisible(Protocol):
    """A causal language model that can be cut.

    Its forward takes token ids, int64 of shape ``(B, T)``, and returns an object with ``logits``. Cut into stages, one
    without the embedding takes hidden states ``(B, T, D)`` instead, and one without the head returns them.

    A model may also have ``cuts_sequences = False``, if the tokens of its hidden states cannot be cut, and a method
    ``check_divisible(*, tp, pp)``, which raises if it cannot be cut so after all.

    Attributes:
        sequence_ways: tensor-parallel ranks between which the tokens of hidden states are cut, 1 until somebody cuts
            them and says so here.
    """

    sequence_ways: int

    @property
    def num_blocks(self) -> int:
        """Transformer blocks."""

    @property
    def width(self) -> int:
        """D, of the hidden states between blocks."""

    @property
    def vocabulary(self) -> int:
        """V, of the logits."""

    @property
    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """What tensor-parallel ranks must divide, by name."""

    @property
    def is_tied(self) -> bool:
        """Whether the head shares the embedding's weight."""

    def tensor_parallel_styles(self, *, sequence: bool) -> dict[str, ParallelStyle]:
        """Torch's style of each module, by name; ``*`` stands for a block's number.

        Args:
            sequence: whether tokens are cut between matrices, so that norms and residuals work on a part of them.
        """

    def tie(self) -> None:
        """Share the head's and the embedding's weight again, where they are tied."""

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Keep one stage and forget the rest; names stay.

        Args:
            blocks: of the stage.
            first: whether it has the embedding.
            last: whether it has the head.
        """


def divisible(model: object, plan: Plan, *, stages: int) -> Divisible:
    """The model, if it can be cut as the plan says.

    Args:
        model: the model.
        plan: with ``tp`` and ``pp``.
        stages: how many parts the pipeline has.

    Raises:
        UsageError: if the model does not know how to be cut.
        SpecError: naming every size that does not divide.
    """
    if not isinstance(model, Divisible):
        raise UsageError(
            f"{type(model).__name__} cannot be cut with tp = {plan.tp}, pp = {plan.pp}: Llama and GPT of thinwire can, "
            "models of transformers in a thinwire.train.models.huggingface.HuggingFaceCausal, and models with the "
            "methods of thinwire.parallel.Divisible; for others use tp = 1 and pp = 1"
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
    elif not keeps_busy(plan.pp, plan.schedule, plan.micro_batches):
        problems.append(
            f"micro_batches = {plan.micro_batches} should be a multiple of {plan.micro_batches // plan.pp} with "
            f"schedule = 'interleaved' and pp = {plan.pp}; a multiple of pp always is"
        )
    if problems:
        raise SpecError(f"plan {plan.name or plan.fingerprint()}", problems)
    return model


def blocks_of_stages(blocks: int, stages: int) -> list[range]:
    """Consecutive blocks for each stage, as evenly as they go."""
    return [range(i * blocks // stages, (i + 1) * blocks // stages) for i in range(stages)]

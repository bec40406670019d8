"""Context parallelism: neighbouring data-parallel ranks share every sequence, and gather keys and values.

Each rank of a group of ``cp`` ranks computes an equal part of the tokens of the same sequences. Only attention looks at
other tokens: it gathers the keys and values of all ranks by torch's all-gather, whose backward adds up their gradients
(as in Llama 3, arXiv 2407.21783, section 3.3.2). Every rank holds the whole model, so that gradients are means over all
data-parallel ranks, as they are without.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives.job.torch_groups import gather_along
from thinwire.errors import UsageError
from thinwire.spec import Plan

IGNORED = -100
"""Label of positions that do not count."""


class Context:
    """The ranks that share sequences, in the order of their parts.

    Attributes:
        ways: Number of these ranks.
        index: Number of this rank's part.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ways, self.index = group.size(), group.rank()

    def part(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of sequences.

        Args:
            ids: Token ids, int64, ``(B, T)``.
            labels: Labels, int64, ``(B, T)``.

        Returns:
            Its ids and labels, ``(B, T / cp)``, and the factor on its mean loss with which the mean of all ranks is the
            mean loss of whole sequences; 0-D.

        Raises:
            UsageError: The ranks do not divide the length.
        """
        if ids.shape[1] % self.ways:
            raise UsageError(
                f"cp = {self.ways} does not divide sequences of {ids.shape[1]} tokens; use a multiple of cp as length"
            )
        mine = labels.chunk(self.ways, 1)[self.index]
        counted = (mine != IGNORED).sum()
        # A part without labels has no mean loss: any labels do, because the factor is zero.
        mine = torch.where(counted == 0, torch.zeros_like(mine), mine)
        return ids.chunk(self.ways, 1)[self.index].contiguous(), mine, self.ways * counted / (labels != IGNORED).sum()

    def gather(self, heads: Tensor) -> Tensor:
        """Gather keys or values of all tokens, ``(B, H, T, C)``, of this rank's, ``(B, H, T / cp, C)``."""
        return gather_along(heads, 2, self._group)

    def positions(self, length: int) -> slice:
        """The positions of this rank's ``length`` tokens."""
        return slice(self.index * length, (self.index + 1) * length)

    def mask(self, length: int, device: torch.device) -> Tensor:
        """Which tokens each of this rank's ``length`` tokens attends to: those before it, and itself.

        Returns:
            bool, ``(length, cp * length)``.
        """
        own = torch.arange(length, device=device) + self.index * length
        return torch.arange(self.ways * length, device=device) <= own.unsqueeze(1)


@runtime_checkable
class SharesContext(Protocol):
    """A model whose attention can gather keys and values."""

    def share_context(self, context: Context) -> None:
        """Take a part of every sequence from now on."""


def share_context(model: nn.Module, plan: Plan, group: dist.ProcessGroup) -> Context:
    """Let a model compute this rank's part of sequences, which the ranks of a group share.

    Raises:
        UsageError: The model cannot.
    """
    if not isinstance(model, SharesContext):
        raise UsageError(
            f"cp = {plan.cp} does not work with {type(model).__name__}: thinwire's Llama, with or without experts, can "
            "share sequences; use cp = 1"
        )
    context = Context(group)
    model.share_context(context)
    return context

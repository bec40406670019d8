"""The ranks that hold the same shares in all islands, and the means over them."""

from __future__ import annotations

import torch

from thinwire.collectives.all_reduce import Feedback, all_reduce, feedback_numels
from thinwire.collectives.messages import Residual
from thinwire.collectives.moves import Moves
from thinwire.collectives.reduce_scatter import EXACT, HopCodecs
from thinwire.collectives.topology import AxisGroup
from thinwire.collectives.visible_mean import visible_mean
from thinwire.program.islands import ALIGNED


class OuterGroup:
    """Ranks of the same position in the islands that take part in an exchange.

    Nothing but this object knows them, so that a group of other members can take its place between two exchanges.

    Args:
        axis: The ranks.
        codecs: Codecs of encoded changes.
    """

    def __init__(self, axis: AxisGroup, codecs: HopCodecs) -> None:
        self._axis, self._codecs = axis, codecs

    @property
    def size(self) -> int:
        """Number of islands that take part."""
        return self._axis.size

    def padded(self, vector: torch.Tensor) -> torch.Tensor:
        """A vector with zeros behind it, so that the islands can cut it into equal, aligned pieces."""
        return torch.nn.functional.pad(vector, (0, -vector.numel() % (ALIGNED * self.size)))

    def feedback_numels(self, numel: int) -> tuple[int, int]:
        """Number of rounding errors that an encoded vector of ``numel`` elements leaves on this rank: of its own
        message, and of its piece of the mean."""
        return feedback_numels(self._axis, numel)

    def mean(
        self,
        vector: torch.Tensor,
        out: torch.Tensor,
        *,
        encoded: bool,
        lost: tuple[Residual | None, Residual | None] = (None, None),
        seed: int | None = None,
    ) -> Moves:
        """``out`` = mean over the islands of ``vector``, bitwise equal on all of them.

        Args:
            vector: Contiguous fp32, 1-D; used as scratch. Its length is a multiple of :attr:`size`.
            out: Contiguous fp32 of the same length.
            encoded: Whether the plan's codec encodes it.
            lost: Rounding errors that are made up for; see :meth:`feedback_numels`.
            seed: Seed for codecs that round at random.
        """
        return all_reduce(
            self._axis,
            vector,
            out,
            scale=1 / self.size,
            codecs=self._codecs if encoded else EXACT,
            feedback=Feedback(*lost),
            seed=seed,
        )

    def visible_mean(self, start: torch.Tensor, change: torch.Tensor, out: torch.Tensor, lost: torch.Tensor) -> Moves:
        """``out`` = mean over the islands of what bf16 shows of their changes; see
        :func:`~thinwire.collectives.visible_mean.visible_mean`."""
        return visible_mean(self._axis, start, change, out, lost)

"""Which piece of a tensor a rank holds, and who holds the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.sharding.shares.boxes import Box, boxes

__all__ = ["Holders", "Live", "NeedsWhole", "ShareSpec"]


class NeedsWhole(Exception):
    """An operation cannot be done piece by piece."""


class Holders(Protocol):
    """The ranks that hold the pieces of a tensor.

    Attributes:
        pieces: how many distinct pieces there are; 1 where every rank holds the whole tensor.
    """

    pieces: int

    def combined(self, partial: torch.Tensor) -> torch.Tensor:
        """Every distinct piece's contribution to a reduction. Collective.

        Args:
            partial: float64, ``[k]``, this rank's; on the CPU.

        Returns:
            float64, ``[pieces, k]``; pieces that several ranks hold appear once.
        """

    def gather(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The whole tensor, flattened, from everyone's pieces. Collective.

        Args:
            name: the parameter whose cut the tensor follows.
            piece: contiguous, 1-D, any dtype; this rank's.

        Returns:
            1-D, on the device of ``piece``.
        """

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of a plain tensor. Collective."""

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's ``values``, uint8, on the CPU. Collective."""


class Live(Protocol):
    """What stands behind a share tensor that shows the runtime's memory."""

    def before_write(self) -> None:
        """The piece is about to change."""

    def after_write(self) -> None:
        """The piece has changed."""

    def norms(self, order: float) -> torch.Tensor | None:
        """Norm of the whole tensor if it is at hand from one exchange for many tensors; fp32, 0-D. Collective."""


@dataclass(frozen=True, eq=False)
class ShareSpec:
    """Which piece of a tensor a rank holds.

    Attributes:
        name: the parameter whose cut the tensor follows.
        shape: of the whole tensor.
        offset: first element of the piece in the flattened tensor.
        length: elements of the piece; 0 where this rank holds nothing.
        holders: the ranks that hold the pieces.
    """

    name: str
    shape: torch.Size
    offset: int
    length: int
    holders: Holders

    @property
    def pieces(self) -> int:
        """How many distinct pieces there are."""
        return self.holders.pieces

    def same_cut(self, other: ShareSpec) -> bool:
        """Whether pieces of two tensors match element by element, on every rank."""
        return self is other or (
            self.holders is other.holders
            and (self.name == other.name)
            and (self.shape, self.offset, self.length) == (other.shape, other.offset, other.length)
        )

    @property
    def boxes(self) -> Sequence[Box]:
        """The piece as boxes of the whole tensor."""
        return boxes(self.shape, self.offset, self.length)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of a plain tensor that broadcasts to the whole shape; 1-D."""
        if whole.numel() == 1:
            return whole.reshape(1).expand(self.length)
        return whole.expand(self.shape).reshape(-1)[self.offset : self.offset + self.length]

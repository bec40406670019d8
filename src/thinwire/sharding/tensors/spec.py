"""Describes the piece of a tensor that a rank holds, and the ranks that hold the other pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from thinwire.agreement import Typed
from thinwire.collectives.all_gather import all_gather, gather_rows
from thinwire.collectives.group import Control
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import UsageError


class NeedsWhole(UsageError):
    """An operation cannot act on pieces, because it needs the whole tensor. Users see it where nothing can gather."""

    def __init__(self) -> None:
        super().__init__(
            "a function of torch's C++ code needs whole parameters, and the model is sharded. If it is "
            "DistributedDataParallel: leave it out, thinwire combines gradients itself; for transformers.Trainer, "
            "Accelerate and Lightning, take thinwire.integrations. If it is another one: call it inside "
            "thinwire.full_parameters(model), and a transform of torch.func with what model.named_parameters() lists "
            "there"
        )

    def __reduce__(self) -> tuple[type[NeedsWhole], tuple[()]]:
        return NeedsWhole, ()  # torch.distributed.checkpoint sends errors to other ranks


class Live(Protocol):
    """The runtime behind a share tensor that is a view of the runtime's memory."""

    def is_own(self, share: Any) -> bool:
        """Whether a share tensor over the runtime's memory is the runtime's, and no alias of it."""

    def before_update(self, share: Any, *, loads: bool = False) -> Any:
        """Prepare for a change of a share's values that may be small against them, and ``loads`` if it may be a load;
        returns a share tensor over other memory that is to take its place, or ``None``. Collective."""
        return None

    def before_write(self) -> None:
        """Prepare for a change of the piece."""

    def after_write(self) -> None:
        """Take note that the piece has changed."""

    def overflowed(self) -> None:
        """Take note that a gradient scaler has found the whole tensor, or another one, not to be finite."""

    def norms(self, _order: float) -> torch.Tensor | None:
        """Norm of the whole tensor from one exchange for many tensors, fp32, 0-D; ``None`` if the runtime has no such
        exchange. Collective."""
        return None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Memory:
    """What a share tensor stores. Its aliases store the same, as tensors over one storage do.

    Attributes:
        held: The piece: contiguous, 1-D, ``[spec.length]``; or a function that returns it, called at every access.
        live: Runtime to notify of changes; ``None`` if the piece is not the runtime's memory.
    """

    held: torch.Tensor | Callable[[], torch.Tensor]
    live: Live | None

    @property
    def piece(self) -> torch.Tensor:
        """The piece."""
        return self.held if isinstance(self.held, torch.Tensor) else self.held()

    def part(self) -> None:
        """Keep the values, because the runtime is about to reuse their memory."""
        self.held, self.live = self.piece.detach().clone(), None


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor with contiguous elements, as checkpoint formats describe it.

    Attributes:
        offsets: First index in each dimension.
        sizes: Number of indices in each dimension.
        start: First element, relative to the piece.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], offset: int, length: int) -> list[Box]:
    """Cut elements ``[offset, offset + length)`` of a row-major tensor into as few boxes as possible.

    A piece of a matrix has at most three boxes: the end of a row, whole rows, and the beginning of a row. Each further
    dimension adds at most two boxes. A piece of length 0 has none.
    """
    shape = tuple(shape)
    cut: list[Box] = []
    position, end = offset, offset + length
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while position < end:
        # The outermost dimension along which a box can begin: all inner indices are zero, and one slice fits.
        dim = next(
            (dim for dim, stride in enumerate(strides) if position % stride == 0 and position + stride <= end),
            len(shape) - 1,
        )
        if not shape:
            cut.append(Box((), (), position - offset))
            break
        index, rest = [], position
        for stride in strides:
            index.append(rest // stride)
            rest %= stride
        count = min((end - position) // strides[dim], shape[dim] - index[dim])
        sizes = (*([1] * dim), count, *shape[dim + 1 :])
        cut.append(Box(tuple(index), sizes, position - offset))
        position += count * strides[dim]
    return cut


Spans = dict[str, tuple[int, int]]
"""For each parameter, the first element and the number of elements on a rank."""

_ROW: Final[Typed[tuple[int, bool, Spans]]] = Typed(tuple[int, bool, Spans])


@dataclass(eq=False)
class Holders:
    """The ranks that hold the pieces of the parameters of a model, and of tensors with the same cut; they exchange
    them over the control lane of the model.

    Attributes:
        pieces: Number of distinct pieces; 1 if every rank holds the whole tensor.
        group: The ranks, for tensors on the host.
        summing: The same ranks, for contributions to reductions.
        device: Where such contributions are exchanged.
        control: The same ranks.
        speaks: Whether this rank contributes its pieces; of several ranks that hold the same, one does.
        spans: Those of this rank; complete before the first exchange.
    """

    pieces: int
    group: AxisGroup
    summing: AxisGroup
    device: torch.device
    control: Control
    speaks: bool
    spans: Spans = field(default_factory=dict)

    def combined(self, partial: torch.Tensor) -> torch.Tensor:
        """Exchange the contributions of pieces to a reduction, ``[k]``, on the CPU or the device of the parameters:
        float64, ``[pieces, k]``, on either; a piece that several ranks hold appears once. Collective."""
        if self.pieces == 1:
            return partial.double().reshape(1, -1)
        rows = gather_rows(self.summing, partial.to(self.device, torch.float64))
        return rows.index_select(0, self._speaking)

    def gather(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Gather the whole tensor, 1-D, from all pieces (contiguous, 1-D, any dtype), on the device of this rank's;
        ``name`` is that of a parameter with the same cut. Collective."""
        everyones = self._table
        # A rank that contributes nothing sends one element, because some backends cannot send empty messages.
        sizes = [max(1, spans[name][1]) if speaks else 1 for speaks, spans in everyones]
        whole = torch.zeros(sum(sizes), dtype=piece.dtype, device="cpu")
        begin = sum(sizes[: self.group.index])
        if self.speaks and piece.numel():
            whole[begin : begin + piece.numel()].copy_(piece)
        all_gather(self.group, whole, sizes).perform()
        total = sum(spans[name][1] for speaks, spans in everyones if speaks)
        result = torch.empty(total, dtype=piece.dtype, device="cpu")
        for part, (speaks, spans) in zip(whole.split(sizes), everyones, strict=True):
            offset, length = spans[name]
            if speaks and length:
                result[offset : offset + length].copy_(part)
        return result.to(piece.device)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average a plain tensor over all ranks. Collective."""
        flat = values.detach().reshape(-1).to(torch.promote_types(values.dtype, torch.float32)).cpu()
        return gather_rows(self.group, flat).mean(0).to(values.dtype).to(values.device).view(values.shape)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's ``values``, which are uint8 on the CPU. Collective."""
        return gather_rows(self.group, values)[0].contiguous()

    @functools.cached_property
    def _speaking(self) -> torch.Tensor:
        """Indices of the ranks that contribute their pieces; together they have each piece once."""
        indices = [index for index, (speaks, _) in enumerate(self._table) if speaks]
        return torch.tensor(indices, device=self.device)

    @functools.cached_property
    def _table(self) -> list[tuple[bool, Spans]]:
        """For each rank, whether it contributes, and its spans; in the order of the group. It never changes."""
        everyone = self.control.all_gather_typed((self.group.index, self.speaks, self.spans), _ROW)
        return [(speaks, spans) for _, speaks, spans in sorted(everyone, key=lambda row: row[0])]


@dataclass(frozen=True, eq=False)
class ShareSpec:
    """Position of a rank's piece in a tensor.

    Attributes:
        name: Name of the parameter with the same cut.
        shape: Shape of the whole tensor.
        offset: First element of the piece in the flattened tensor.
        length: Number of elements in the piece; 0 if this rank holds nothing.
        holders: Ranks that hold the pieces.
    """

    name: str
    shape: torch.Size
    offset: int
    length: int
    holders: Holders

    @property
    def pieces(self) -> int:
        """Number of distinct pieces."""
        return self.holders.pieces

    def same_cut(self, other: ShareSpec) -> bool:
        """Whether the pieces of two tensors have the same elements on every rank."""
        return self is other or (
            self.holders is other.holders
            and self.name == other.name
            and (self.shape, self.offset, self.length) == (other.shape, other.offset, other.length)
        )

    def is_before(self, other: ShareSpec) -> bool:
        """Whether a tensor was cut as a parameter was before it got masters, which have another dtype."""
        return self.name == other.name and self.holders is not other.holders

    @property
    def boxes(self) -> Sequence[Box]:
        """The piece as boxes of the whole tensor. One without elements has one, which every rank holds, so that
        checkpoints know it."""
        if not self.shape.numel():
            return [Box((0,) * len(self.shape), tuple(self.shape), 0)]
        return boxes(self.shape, self.offset, self.length)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Cut this rank's piece, 1-D, from a plain tensor that broadcasts to the whole shape."""
        if whole.numel() == 1:
            return whole.reshape(1).expand(self.length)
        return whole.expand(self.shape).reshape(-1)[self.offset : self.offset + self.length]

"""The units of a model under a plan: their buffers, padding, and the share of each owner.

They equal the runtime's; a test compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

from thinwire.cost.blocks import ModelPart, Tensor
from thinwire.cost.shapes import parts
from thinwire.program import Axis, BufferInfo, Even, UnitInfo, axis_shape, deal, flat_numel, slot_offsets
from thinwire.program.wire import ITEMSIZE, is_excluded, separates
from thinwire.spec import ModelSpec, Plan


def units(model: ModelSpec, plan: Plan, shard: int = 0) -> tuple[UnitInfo, ...]:
    """The units of a model under a plan, as the program needs them.

    Args:
        model: Dimensions of the model.
        plan: The plan; its factors, dtype and exclusions count.
        shard: Number of the ``P`` shard; shares of unequal size differ between shards.

    Raises:
        SpecError: The plan cuts single blocks further than the rest, which has no price yet.
    """
    if any(unit.granularity not in (None, plan.granularity) for unit in plan.units):
        raise plan.unsuitable(
            "units: granularity of single blocks is executed, but neither planned nor simulated; leave it unset here"
        )
    own = parts(model, plan.granularity, plan.tp, plan.ep)
    if plan.ep == 1:
        return _units(own, plan, shard)
    rest = iter(_units([part for part in own if not part.is_experts], plan, shard))
    experts = iter(_units([part for part in own if part.is_experts], plan.for_experts(), shard))
    return tuple(replace(next(experts), experts=True) if part.is_experts else next(rest) for part in own)


def _units(own: Sequence[ModelPart], plan: Plan, shard: int) -> tuple[UnitInfo, ...]:
    """The units of some parts, all of them under one plan."""
    if not (plan.units or separates(plan) or plan.partition == "inter"):
        return _even_units(own, plan)
    cut = _cut(own, plan)
    buffers = _flat_buffers(plan, cut)
    shares = iter(_shares(plan, buffers, shard))
    lengths, sizes = iter(buffer.numel for buffer in buffers), iter(buffer.itemsize for buffer in buffers)
    return tuple(
        UnitInfo(
            part.name,
            tuple(BufferInfo(next(lengths), next(sizes), True, next(shares), encoded) for encoded, _ in kinds),
            len(part.tensors),
            part.block,
            plan.override(part.name).keep_gathered if plan.units else None,
            plan.overlap.input_gradient and part.is_linear,
        )
        for part, kinds in cut
    )


def _even_units(cut: Iterable[ModelPart], plan: Plan) -> tuple[UnitInfo, ...]:
    """The units of a plan that treats all alike and cuts them evenly: parts of equal size share their buffers."""
    itemsize, (local, nodes) = ITEMSIZE[plan.compute_dtype], axis_shape(plan, Axis.SHARD)
    buffers: dict[int, tuple[BufferInfo, ...]] = {}
    made, first, owners = [], plan.overlap.input_gradient, local * nodes
    for part in cut:
        payload = part.numel if part.aligned else _payload(part.tensors, itemsize)
        if payload not in buffers:
            numel = flat_numel(payload, plan, itemsize)
            share = Even(numel // plan.params.ranks // owners, owners)
            buffers[payload] = (BufferInfo(numel, itemsize, True, share, True),)
        parameters = len(part.tensors)
        made.append(UnitInfo(part.name, buffers[payload], parameters, part.block, None, first and part.is_linear))
    return tuple(made)


def largest_share(model: ModelSpec, plan: Plan) -> int:
    """Number of elements on the rank that owns the most optimizer states of the first ``P`` shard.

    The same as the largest sum of :func:`units`' shares, without a list of every owner's. Of the plan, factors,
    partition, dtype and exclusions count.
    """
    buffers = _flat_buffers(plan, _cut(parts(model, plan.granularity, plan.tp), plan))
    local, nodes = axis_shape(plan, Axis.SHARD)
    if plan.partition == "intra" or local * nodes == 1:
        return sum(buffer.numel // plan.optimizer.ranks for buffer in buffers)
    pieces = [piece for _, piece in _all_pieces(plan, buffers, 0)]
    owned: Counter[int] = Counter()
    for piece, owner in zip(pieces, deal(pieces, local * nodes), strict=True):
        owned[owner] += piece
    return max(owned.values())


class _FlatBuffer(NamedTuple):
    """A flat buffer of a unit, before it has owners.

    Attributes:
        tensors: Parameters in it.
        itemsize: Bytes of an element.
        numel: Elements, including padding.
    """

    tensors: tuple[Tensor, ...]
    itemsize: int
    numel: int


_Kinds = Sequence[tuple[bool, tuple[Tensor, ...]]]


def _flat_buffers(plan: Plan, cut: Iterable[tuple[ModelPart, _Kinds]]) -> list[_FlatBuffer]:
    made = []
    for part, kinds in cut:
        itemsize = ITEMSIZE[plan.unit_dtype(part.name) if plan.units else plan.compute_dtype]
        for _, tensors in kinds:
            whole = part.aligned and tensors is part.tensors
            payload = part.numel if whole else _payload(tensors, itemsize)
            made.append(_FlatBuffer(tensors, itemsize, flat_numel(payload, plan, itemsize)))
    return made


def _cut(own: Iterable[ModelPart], plan: Plan) -> list[tuple[ModelPart, _Kinds]]:
    """Parts, each with its tensors that may be encoded, and those that are always sent unencoded."""
    some = separates(plan)
    return [(part, _kinds(part, plan, some=some)) for part in own]


def _kinds(part: ModelPart, plan: Plan, *, some: bool) -> _Kinds:
    exact = bool(plan.units) and plan.override(part.name).codec is not None
    if exact or not some:
        return [(not exact, part.tensors)]
    excluded = [is_excluded(plan, tensor.name, is_whole=tensor.is_whole) for tensor in part.tensors]
    if not any(excluded):
        return [(True, part.tensors)]
    kinds = [(encoded, tuple(compress(part.tensors, map(encoded.__ne__, excluded)))) for encoded in (True, False)]
    return [(encoded, tensors) for encoded, tensors in kinds if tensors]


def _payload(tensors: Sequence[Tensor], itemsize: int) -> int:
    """Elements of a flat buffer up to the end of its last parameter."""
    return slot_offsets([tensor.numel for tensor in tensors], itemsize)[-1] + tensors[-1].numel


def _shares(plan: Plan, buffers: Sequence[_FlatBuffer], shard: int) -> list[Sequence[int]]:
    local, nodes = axis_shape(plan, Axis.SHARD)
    owners = local * nodes
    if plan.partition == "intra" or owners == 1:
        return [Even(buffer.numel // plan.params.ranks // owners, owners) for buffer in buffers]
    pieces = _all_pieces(plan, buffers, shard)
    shares = [[0] * owners for _ in buffers]
    for (index, piece), owner in zip(pieces, deal([piece for _, piece in pieces], owners), strict=True):
        shares[index][owner] += piece
    return [tuple(share) for share in shares]


def _all_pieces(plan: Plan, buffers: Sequence[_FlatBuffer], shard: int) -> list[tuple[int, int]]:
    """The parts of tensors in a ``P`` shard: number of the buffer, and number of elements."""
    lengths = [buffer.numel // plan.params.ranks for buffer in buffers]
    return [
        (index, piece)
        for index, (buffer, length) in enumerate(zip(buffers, lengths, strict=True))
        for piece in _pieces(buffer.tensors, buffer.itemsize, shard * length, (shard + 1) * length)
    ]


def _pieces(tensors: Sequence[Tensor], itemsize: int, begin: int, end: int) -> Iterable[int]:
    """Number of elements that each parameter contributes to ``[begin, end)`` of its flat buffer."""
    offsets = slot_offsets([tensor.numel for tensor in tensors], itemsize)
    for tensor, offset in zip(tensors, offsets, strict=True):
        length = min(offset + tensor.numel, end) - max(offset, begin)
        if length > 0:
            yield length

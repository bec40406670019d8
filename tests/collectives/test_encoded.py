"""Collectives with codecs equal a plain loop that encodes, decodes and adds, bit for bit, on every mesh."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from thinwire import codecs
from thinwire.agreement import Typed
from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.all_reduce import Feedback, all_reduce, feedback_spans
from thinwire.collectives.group import Meter, control
from thinwire.collectives.messages import Residual
from thinwire.collectives.point_to_point import point_to_point
from thinwire.collectives.reduce_scatter import HopCodecs, reduce_scatter
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Kind, Lane, MessageSizes, Scope, hops
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.spec import Factor, Plan
from thinwire.testing import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.smoke]

MESHES = [(1, 4), (4, 1), (2, 2), (3, 2), (2, 3)]


class Everyone:
    """The data of all ranks and their positions along the axis, computed here instead of by thinwire."""

    def __init__(self, nodes: int, local: int, sizes: list[int], dtype: torch.dtype) -> None:
        self.nodes, self.local, self.sizes = nodes, local, sizes
        self.starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        generators = [torch.Generator().manual_seed(rank) for rank in range(nodes * local)]
        self.held = [torch.randn(self.starts[-1], generator=generator).to(dtype) for generator in generators]

    def rank(self, place: int, node: int) -> int:
        return node * self.local + place

    def piece(self, whole: torch.Tensor, place: int, node: int) -> torch.Tensor:
        at = place * self.nodes + node
        return whole[self.starts[at] : self.starts[at + 1]]

    def column(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        return whole[self.starts[place * self.nodes] : self.starts[(place + 1) * self.nodes]]

    def node_sum(
        self, place: int, node: int, inside: Codec | None, *, rounded: bool = False, by_piece: bool = False
    ) -> torch.Tensor:
        """The part of its column that rank (place, node) holds after the hop inside the node."""
        first = place * self.nodes
        sizes = self.sizes[first : first + self.nodes] if by_piece else None
        mine = self.held[self.rank(place, node)]
        total = self.column(mine, place).float()
        for other in range(self.local):
            if other != place:
                sent = self.column(self.held[self.rank(other, node)], place)
                parts = [sent] if sizes is None else sent.split(sizes)
                total = total + (sent.float() if inside is None else torch.cat([through(inside, p) for p in parts]))
        return total.to(mine.dtype).float() if rounded else total

    def total(self, place: int, node: int, at_hops: HopCodecs, scale: float) -> torch.Tensor:
        """The final result of rank (place, node)."""
        if self.nodes == 1:
            return self.node_sum(place, node, at_hops.inside) * scale
        if self.local == 1:
            sums = [self.held[other] for other in range(self.nodes)]
        else:
            how = {"rounded": is_lossless(at_hops.across), "by_piece": at_hops.recode}
            sums = [self.node_sum(place, other, at_hops.inside, **how) for other in range(self.nodes)]
        own = slice(sum(self.sizes[place * self.nodes : place * self.nodes + node]), None)
        pieces = [column[own][: self.sizes[place * self.nodes + node]] for column in sums]
        total = pieces[node].float()
        for other in range(self.nodes):
            if other != node:
                sent = pieces[other]
                total = total + (sent.float() if at_hops.across is None else through(at_hops.across, sent))
        return total * scale


def through(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """A tensor's values after a journey, fp32."""
    return codec.decode_add(codec.encode(x), torch.zeros(x.numel()), encoded=x.dtype)


def is_lossless(codec: Codec | None) -> bool:
    return codec is None or codec.spec.is_lossless


def world_group(nodes: int, local: int) -> tuple[AxisGroup, Meter]:
    mesh = Factor(local=local, nodes=nodes)
    plan = Plan(mesh=mesh, params=mesh, grads=mesh, optimizer=mesh)
    meter = Meter()
    group = AxisGroup.of(plan, Axis.PARAMS, Lane.SYNC, control().rank, torch.device("cpu"), meter, TRANSFERS)
    return group, meter


def named(name: str | None) -> Codec | None:
    return None if name is None else codecs.get(name)


def check_everything(nodes: int, local: int) -> None:
    group, meter = world_group(nodes, local)
    node, place = divmod(control().rank, local)
    for sizes in ([600] * (nodes * local), [(397 * i) % 1000 for i in range(nodes * local)]):
        for dtype in (torch.float32, torch.bfloat16):
            everyone = Everyone(nodes, local, sizes, dtype)
            for names in [("int8:256", "int4:256"), (None, "int4:64"), ("mpc", "zfp:8"), ("bf16", None)]:
                check_reduction(group, meter, everyone, (place, node), HopCodecs(named(names[0]), named(names[1])))
            check_reduction(group, meter, everyone, (place, node), HopCodecs(None, named("mpc")))
            for name in ("mpc", *(["exp3"] if dtype == torch.bfloat16 else [])):
                check_lossless(group, everyone, codecs.get(name))
            for name in ("int8:256", "mpc", "int4:256,stochastic", *(["exp3"] if dtype == torch.bfloat16 else [])):
                check_gather(group, meter, everyone, codecs.get(name))


def check_reduction(
    group: AxisGroup, meter: Meter, everyone: Everyone, position: tuple[int, int], at_hops: HopCodecs
) -> None:
    place, node = position
    mine = everyone.held[control().rank]
    expected = everyone.total(place, node, at_hops, 0.25)
    out = torch.full_like(expected, math.nan)
    meter.take()
    reduce_scatter(group, mine.clone(), out, scale=0.25, sizes=everyone.sizes, codecs=at_hops).perform()
    assert torch.equal(out, expected)
    check_bytes(group, meter, everyone, at_hops, mine.dtype)

    added = torch.ones_like(expected)
    reduce_scatter(
        group, mine.clone(), added, scale=0.25, sizes=everyone.sizes, codecs=at_hops, accumulate=True
    ).perform()
    torch.testing.assert_close(added, expected + 1)


def check_lossless(group: AxisGroup, everyone: Everyone, codec: Codec) -> None:
    """No bit of a reduction changes, whatever it adds to."""
    mine, sizes = everyone.held[control().rank].clone(), everyone.sizes
    mine[::7] = -0.0
    even = mine[: mine.numel() // group.size * group.size]
    for accumulate in (False, True):
        sums = []
        for at_hops in (HopCodecs(), HopCodecs(codec, codec)):
            how = {"scale": 0.3, "codecs": at_hops, "accumulate": accumulate}
            piece, whole = torch.ones(sizes[group.index]), torch.ones(even.numel())
            reduce_scatter(group, mine.clone(), piece, sizes=sizes, **how).perform()
            all_reduce(group, even.clone(), whole, **how).perform()
            sums.append(torch.cat([piece, whole]).view(torch.int32))
        assert torch.equal(*sums)


def check_bytes(group: AxisGroup, meter: Meter, everyone: Everyone, at_hops: HopCodecs, dtype: torch.dtype) -> None:
    sent = meter.take()[Lane.SYNC]
    sums = dtype if is_lossless(at_hops.across) or 1 in (group.nodes, group.local) else torch.float32
    columns = [sum(everyone.sizes[i : i + group.nodes]) for i in range(0, group.size, group.nodes)]
    inside = [message_bytes(at_hops.inside, n, dtype) for i, n in enumerate(columns) if i != group.local_index]
    if at_hops.recode and 1 not in (group.nodes, group.local):
        assert at_hops.inside is not None
        at = group.local_index * group.nodes
        others = everyone.sizes[:at] + everyone.sizes[at + group.nodes :]
        inside = [at_hops.inside.slot_bytes(n, dtype) for n in others]
    first = group.local_index * group.nodes
    row = everyone.sizes[first : first + group.nodes]
    across = [message_bytes(at_hops.across, n, sums) for i, n in enumerate(row) if first + i != group.index]
    for codec, scope, most in ((at_hops.inside, Scope.INSIDE, inside), (at_hops.across, Scope.ACROSS, across)):
        if codec is not None and codec.spec.is_variable_length:
            assert sent[scope] <= sum(most) + 8 * len(most)
        else:
            assert sent[scope] == sum(most)


def message_bytes(codec: Codec | None, numel: int, dtype: torch.dtype) -> int:
    plain = numel * dtype.itemsize
    most = plain if codec is None else codec.max_wire_bytes(numel, dtype)
    return min(plain, most) if codec is not None and codec.spec.is_variable_length else most


def check_gather(group: AxisGroup, meter: Meter, everyone: Everyone, codec: Codec) -> None:
    rank, seed = control().rank, 77
    pieces = []
    for place in range(everyone.local):
        for node in range(everyone.nodes):
            other = everyone.rank(place, node)
            piece = everyone.piece(everyone.held[other], place, node)
            message = codec.encode(piece, seed=seed + other)
            pieces.append(codec.decode(message, piece.numel(), piece.dtype))
    whole = torch.full_like(everyone.held[rank], math.nan)
    node, place = divmod(rank, everyone.local)
    everyone.piece(whole, place, node).copy_(everyone.piece(everyone.held[rank], place, node))
    meter.take()
    all_gather(group, whole, everyone.sizes, codec=codec, seed=seed + rank).perform()
    assert torch.equal(whole, torch.cat(pieces))
    if not codec.spec.is_variable_length:
        slots = [codec.slot_bytes(size, whole.dtype) for size in everyone.sizes]
        predicted = hops(Kind.ALL_GATHER, everyone.local, everyone.nodes, slots, group.index, MessageSizes.plain(1))
        sent = meter.take()[Lane.SYNC]
        assert sent == {scope: sum(hop.sent for hop in predicted if hop.scope is scope) for scope in Scope}


@pytest.mark.parametrize(("nodes", "local"), MESHES)
def test_encoded_collectives_equal_a_plain_loop(nodes: int, local: int) -> None:
    run_ranks(nodes * local, check_everything, nodes, local)


def exchange(nodes: int, local: int) -> None:
    """Two members: each vector is encoded once, whole, and both add up the same two messages."""
    group, meter = world_group(nodes, local)
    scope = Scope.ACROSS if nodes > 1 else Scope.INSIDE
    for dtype in (torch.float32, torch.bfloat16):
        everyone = Everyone(nodes, local, [350, 350], dtype)
        for codec in map(codecs.get, ("int4:256", "int8:64", "mpc")):
            expected = (through(codec, everyone.held[0]) + through(codec, everyone.held[1])) * 0.5
            if is_lossless(codec):
                expected = expected.to(dtype).float()
            out = torch.full((690,), math.nan)
            vector = everyone.held[group.index]
            meter.take()
            all_reduce(group, vector.clone(), out, scale=0.5, codecs=HopCodecs(codec, codec)).perform()
            assert torch.equal(out, expected[:690])
            sent = meter.take()[Lane.SYNC][scope]
            if codec.spec.is_variable_length:
                assert sent <= 700 * dtype.itemsize + 8
            else:
                slot = MessageSizes(*[partial(codec.slot_bytes, dtype=dtype)] * 3, encoded=True)
                predicted = hops(Kind.ALL_REDUCE, local, nodes, [350, 350], group.index, slot)
                assert [(hop.scope, hop.sent) for hop in predicted] == [(scope, sent)]
            added = torch.ones(700)
            codec_pair = HopCodecs(codec, codec)
            all_reduce(group, vector.clone(), added, scale=0.5, accumulate=True, codecs=codec_pair).perform()
            check_lossless(group, everyone, codecs.get("mpc"))
            assert torch.equal(added, 1 + expected)


@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (1, 2)])
def test_two_members_exchange_whole_vectors(nodes: int, local: int) -> None:
    run_ranks(2, exchange, nodes, local)


def send(nodes: int, local: int, name: str | None) -> None:
    """A message from the last member to the first; the members between take no part."""
    group, meter = world_group(nodes, local)
    stage = Stage.SCATTER_ACROSS if nodes > 1 else Stage.SCATTER_INSIDE
    subgroup = group.hops[stage]
    source, target = subgroup.size - 1, 0
    for dtype in (torch.float32, torch.bfloat16):
        sent = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(dtype)
        codec = None if name is None else codecs.get(name)
        tensor = sent.clone() if subgroup.index == source else torch.full_like(sent, math.nan)
        meter.take()
        if subgroup.index in (source, target):
            point_to_point(subgroup, tensor, source, target, codec=codec).perform()
        counted = meter.take()[Lane.SYNC][stage.scope]
        if subgroup.index == target:
            assert torch.equal(tensor, sent if codec is None else codec.decode(codec.encode(sent), 1000, dtype))
        if subgroup.index == source:
            announced = 8 if codec is not None and codec.spec.is_variable_length else 0
            assert torch.equal(tensor, sent)
            assert counted == announced + (1000 * dtype.itemsize if codec is None else codec.encode(sent).numel())
        else:
            assert counted == 0


@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (1, 3)])
def test_a_tensor_goes_from_one_member_to_another(nodes: int, local: int) -> None:
    for name in (None, "int8:256", "mpc"):
        run_ranks(nodes * local, send, nodes, local, name)


def feed_back(nodes: int, local: int, gain: float, steps: int) -> None:
    group, _ = world_group(nodes, local)
    at_hops = HopCodecs(codecs.get("int8:256"), codecs.get("int2:256"))
    numel = 1536
    world = nodes * local
    everyone = Everyone(nodes, local, [numel // world] * world, torch.float32)
    mean = torch.stack(everyone.held).mean(0)
    counts = (end - begin for begin, end in feedback_spans(group, numel))
    scatter, gather = (Residual(torch.zeros(count), gain) if count else None for count in counts)
    totals = torch.zeros(2, numel)
    for total, kept in zip(totals, (None, Feedback(scatter, gather)), strict=True):
        for _ in range(steps):
            out = torch.full((numel,), math.nan)
            vector = everyone.held[control().rank].clone()
            all_reduce(group, vector, out, scale=1 / world, codecs=at_hops, feedback=kept).perform()
            total += out
    without, with_feedback = (total / steps - mean for total in totals)
    # What is lost once comes back: the sum is off by the loss of 1 / gain steps, however many steps there were.
    assert with_feedback.norm() < 4 / gain * without.norm() / steps
    everyone_else = control().all_gather_typed(totals.tolist(), Typed[list[list[float]]](list[list[float]]))
    assert all(other == everyone_else[0] for other in everyone_else), "replicas differ"


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 1), (1, 3), (2, 1), (1, 2)])
def test_error_feedback_returns_what_was_lost(nodes: int, local: int) -> None:
    run_ranks(nodes * local, feed_back, nodes, local, 1.0, 30)
    run_ranks(nodes * local, feed_back, nodes, local, 0.1, 120)


def poison(nodes: int, local: int) -> None:
    """NaN and infinity on one rank arrive everywhere they should, and beyond the codec's block nowhere else."""
    group, _ = world_group(nodes, local)
    cases = [(name, torch.float32) for name in ("int4:256", "zfp:8", "mpc", "bf16", None)]
    for name, dtype in (*cases, (None, torch.bfloat16)):
        for bad in (math.nan, math.inf):
            vector = torch.ones(nodes * local * 512, dtype=dtype)
            if control().rank == 1:
                vector[700] = bad
            out = torch.zeros(vector.numel())
            all_reduce(group, vector, out, codecs=HopCodecs(named(name), named(name))).perform()
            others = torch.cat([out[:700], out[701:]]) if name is None else out[1024:]
            assert not math.isfinite(out[700])
            assert torch.isfinite(others).all()


def test_nonfinite_values_never_turn_finite() -> None:
    run_ranks(4, poison, 2, 2)

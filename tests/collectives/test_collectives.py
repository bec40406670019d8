"""Collectives along every axis, compared with a plain loop: every rank's result, for even and uneven pieces."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.agreement import Typed
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.all_reduce import all_reduce
from thinwire.collectives.group import Meter, control, recording
from thinwire.collectives.reduce_scatter import reduce_scatter
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import CollectiveError
from thinwire.program import Axis, Kind, Lane, MessageSizes, Scope, axis_index, hops
from thinwire.program.stages import TRANSFERS
from thinwire.spec import Factor, Plan
from thinwire.testing import RankError, RankPool, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.smoke]

MESHES = [(1, 4), (4, 1), (2, 2), (3, 2), (2, 3)]


def world_group(nodes: int, local: int) -> tuple[AxisGroup, Meter, int]:
    mesh = Factor(local=local, nodes=nodes)
    plan = Plan(mesh=mesh, params=mesh, grads=mesh, optimizer=mesh)
    meter, rank = Meter(), control().rank
    return AxisGroup.of(plan, Axis.PARAMS, Lane.REDUCE, rank, torch.device("cpu"), meter, TRANSFERS), meter, rank


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers a bf16 holds exactly, different on every rank."""
    return ((torch.arange(numel) * 7 + rank * 3) % 31 - 15).to(dtype)


def piece_sizes(count: int, uneven: bool) -> list[int]:
    return [(5 * i) % 7 for i in range(count)] if uneven else [6] * count


def order(nodes: int, local: int) -> list[int]:
    """Ranks by position along the axis, local-major: computed here, not by thinwire."""
    return [node * local + place for place in range(local) for node in range(nodes)]


def check_all(nodes: int, local: int) -> None:
    group, meter, rank = world_group(nodes, local)
    world = nodes * local
    at = order(nodes, local).index(rank)
    assert group.index == at
    for dtype in (torch.float32, torch.bfloat16):
        for uneven in (False, True):
            sizes = piece_sizes(world, uneven)
            starts = [sum(sizes[:i]) for i in range(world + 1)]
            mine = slice(starts[at], starts[at + 1])
            total = sum(values(r, starts[-1], torch.float64) for r in range(world))

            whole = torch.full((starts[-1],), math.nan, dtype=dtype)
            whole[mine] = values(rank, starts[-1], dtype)[mine]
            all_gather(group, whole, sizes).perform()
            for position, other in enumerate(order(nodes, local)):
                part = slice(starts[position], starts[position + 1])
                assert torch.equal(whole[part], values(other, starts[-1], dtype)[part])

            for out_dtype in {torch.float32, dtype}:
                out = torch.full((sizes[at],), math.nan, dtype=out_dtype)
                meter.take()
                reduce_scatter(group, values(rank, starts[-1], dtype), out, scale=0.25, sizes=sizes).perform()
                assert torch.equal(out.double(), (total[mine] * 0.25).to(out_dtype).double())
                sent = meter.take()[Lane.REDUCE]
                itemsize = dtype.itemsize
                predicted = hops(Kind.REDUCE_SCATTER, local, nodes, sizes, at, MessageSizes.plain(itemsize))
                assert sent == {s: sum(hop.sent for hop in predicted if hop.scope is s) for s in Scope}
            added = torch.ones(sizes[at])
            reduce_scatter(
                group, values(rank, starts[-1], dtype), added, scale=1 / 3, accumulate=True, sizes=sizes
            ).perform()
            torch.testing.assert_close(added.double(), 1 + total[mine] / 3, rtol=1e-6, atol=1e-5)

        numel = 4 * world
        total = sum(values(r, numel, torch.float64) for r in range(world))
        for keep in (numel, numel - 3):  # the last elements may be padding
            for scale in (1.0, 1.0 / world):
                out = torch.full((keep,), math.nan)
                all_reduce(group, values(rank, numel, dtype), out, scale=scale).perform()
                expected = (total[:keep] * scale).to(dtype).double()
                torch.testing.assert_close(
                    out.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=0
                )
                everyone = control().all_gather_typed(out.tolist(), Typed[list[float]](list[float]))
                assert all(other == everyone[0] for other in everyone), "replicas differ"


@pytest.mark.parametrize(("nodes", "local"), MESHES)
def test_collectives_equal_a_plain_loop(nodes: int, local: int) -> None:
    run_ranks(nodes * local, check_all, nodes, local)


def one_inside_other(nodes: int, local: int) -> list[tuple[int, int]]:
    with recording() as records:
        group, _, _ = world_group(nodes, local)
        all_gather(group, torch.zeros(8 * nodes * local)).perform()
    return [(len(record.ranks), record.sent) for record in records]


def test_each_byte_enters_a_node_once() -> None:
    results = run_ranks(6, one_inside_other, 3, 2)
    # 8 fp32 elements a rank: across, each rank sends its own to two peers; inside, a column of three to one neighbour.
    assert all(result == [(3, 2 * 32), (2, 3 * 32)] for result in results)


def test_positions_along_an_axis_are_local_major() -> None:
    mesh = Factor(local=3, nodes=2)
    plan = Plan(mesh=mesh, params=mesh, grads=mesh, optimizer=mesh)
    assert [axis_index(plan, Axis.PARAMS, rank) for rank in range(6)] == [0, 2, 4, 1, 3, 5]


def leave_early(nodes: int, local: int) -> None:
    group, _, rank = world_group(nodes, local)
    if rank == 3:
        return
    reduce_scatter(group, torch.zeros(64), torch.zeros(16)).perform()


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_within_the_timeout() -> None:
    pool = RankPool(4)
    try:
        with pytest.raises(RankError) as failure:
            pool.run(leave_early, 1, 4, timeout=30, group_timeout=4)
        assert CollectiveError.__name__ in str(failure.value)
        assert "reduce_scatter on the reduce lane with ranks [0, 1, 2, 3] failed" in str(failure.value)
        assert "rank 3 said nothing: dead, stuck or cut off" in str(failure.value)
    finally:
        pool.close()

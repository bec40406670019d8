"""A compressed axis: every operation, exact transfers, and the pitfalls of intercepting torch's process groups.

The checks of one job share its four processes; a failure names the check.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.support.intercept import (
    LIMITS,
    check_operations,
    error,
    mesh_of,
    strictly,
    values,
)
from tests.support.torch_names import (
    all_gather_single,
    functional_gather_single,
    reduce_scatter_single,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager, _world
from torch.distributed.tensor import DTensor, Replicate, Shard

import thinwire as tw
from thinwire import codecs
from thinwire.errors import CollectiveError, SpecError, UsageError
from thinwire.intercept.mesh import ROLES
from thinwire.intercept.scope import in_step
from thinwire.testing import RankError, RankPool, run_ranks

pytestmark = pytest.mark.ranks


# -------------------------------------------------------------------------------------------------- every operation


def operations_job(*names: str) -> None:
    meshes = {
        "axis of two": mesh_of((2, 2))["tp"],
        "axis of four": mesh_of((4,), ("tp",)),
        "backend": mesh_of((1, 4), ("dp", "tp"), backend_override={"tp": tw.axis_backend("mpc")})["tp"],
    }
    for mesh in meshes.values():
        for codec in names:
            group = tw.compress_axis(mesh, "tp", codec)
            group.traffic(reset=True)
            dtypes = (torch.bfloat16,) if codec == "exp3" else (torch.float32, torch.bfloat16, torch.float16)
            every = dtypes if codec in ("int8:256", "mpc", "exp3") else dtypes[:1]
            check_operations(group, codec, LIMITS[codec], every)
            traffic = group.traffic()
            assert traffic.codecs == {codec}
            assert {row.op for row in traffic.rows if row.codec == codec} == {
                "all_reduce",
                "all_gather",
                "reduce_scatter",
                "send",
                "recv",
            }
            # The checks themselves sent objects, as bytes and lengths.
            assert {row.why for row in traffic.rows if row.codec == "none"} == {"uint8", "int64"}
            if LIMITS[codec]:
                assert traffic.sent < traffic.plain
            assert traffic.bypassed == 0


@pytest.mark.slow
def test_every_operation_is_encoded_and_right() -> None:
    run_ranks(4, strictly, operations_job, "int8:256", "mpc", timeout=200)


@pytest.mark.slow
def test_every_operation_with_the_other_codecs() -> None:
    run_ranks(4, strictly, operations_job, *sorted(set(LIMITS) - {"int8:256", "mpc"}), timeout=200)


# -------------------------------------------------------------------------------------------------- what stays exact


def exact_job() -> None:
    mesh = mesh_of()
    group = tw.compress_axis(mesh, "tp", "zfp:8")
    rank = dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    mine, other = values(rank, 4096), values(ranks[1 - group.rank()], 4096)

    def reasons(run: Callable[[], object]) -> set[str]:
        group.traffic(reset=True)
        run()
        traffic = group.traffic()
        assert not traffic.codecs
        return {row.why for row in traffic.rows}

    def summed(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, op=op, group=group)
        return tensor

    def check_sum() -> None:
        assert torch.equal(summed(mine), mine + other)

    assert reasons(check_sum) == {"outside a step"}
    with tw.step_scope():
        assert not torch.equal(summed(mine), mine + other)
        with tw.exact_scope():
            assert reasons(check_sum) == {"exact scope"}
        assert reasons(lambda: summed(torch.arange(4096))) == {"int64"}
        assert reasons(lambda: summed(mine.double())) == {"float64"}
        assert reasons(lambda: summed(mine > 0, dist.ReduceOp.MAX)) == {"bool"}
        assert reasons(lambda: summed(mine[:1000])) == {"tiny"}
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            assert reasons(lambda op=op: summed(mine, op)) == {"operation"}
        assert torch.equal(summed(mine, dist.ReduceOp.MAX), torch.maximum(mine, other))

        def broadcast() -> None:
            tensor = mine.clone()
            dist.broadcast(tensor, group=group, group_src=0)
            assert torch.equal(tensor, values(ranks[0], 4096))

        assert reasons(broadcast) == {""}
        dist.barrier(group=group)

        tw.compress_axis(mesh, "tp", "zfp:16")
        assert reasons(lambda: summed(mine.bfloat16())) == {"no smaller"}
        tw.compress_axis(mesh, "tp", "exp3")
        assert reasons(lambda: summed(mine)) == {"float32"}
        tw.compress_axis(mesh, "tp", "none")
        assert reasons(check_sum) == {""}

        # A codec for each kind of operation.
        tw.compress_axis(mesh, "tp", "zfp:8", gather="none", send="mpc")
        whole = torch.empty(8192)
        assert reasons(lambda: all_gather_single(whole, mine, group=group)) == {""}
        assert torch.equal(whole[4096 * group.rank() :][:4096], mine)
        assert not torch.equal(summed(mine), mine + other)

    # Sub-meshes, flattened meshes of one axis, and names all lead to the same group.
    assert mesh["tp"].get_group() is group
    assert mesh.get_group("dp") is not group

    # full_tensor and checkpoints' gathers, with the parameters of a step.
    tw.compress_axis(mesh, "tp", "int4:256")
    full = values(7, 1 << 14).view(128, 128)
    sharded = DTensor.from_local(full.chunk(2)[group.rank()], mesh["tp"], [Shard(0)])
    assert torch.equal(sharded.full_tensor(), full)
    with tw.step_scope():
        assert not torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), full)
        with tw.exact_scope():
            assert torch.equal(sharded.full_tensor(), full)
        # Norms: scalars, whatever they are made of.
        group.traffic(reset=True)
        norm = torch.linalg.vector_norm(sharded).full_tensor()
        assert not group.traffic().codecs
    torch.testing.assert_close(norm, full.norm())

    # Transfers of the default group next to the mesh's axis stay exact.
    whole_mesh = mesh_of((4,), ("all",))
    tw.compress_axis(whole_mesh, "all", "zfp:8")
    with tw.step_scope():
        exact, lossy = mine.clone(), mine.clone()
        dist.all_reduce(exact)
        dist.all_reduce(lossy, group=whole_mesh.get_group())
    torch.testing.assert_close(exact, sum(values(r, 4096) for r in range(4)))
    assert error(lossy, exact) > 1e-4

    # NaN and infinity stay unchanged, on other ranks too.
    for codec in ("zfp:8", "int8:256", "int4:256,hadamard", "mpc", "bf16"):
        tw.compress_axis(mesh, "tp", codec)
        for bad in (math.nan, math.inf, -math.inf):
            tensor = torch.ones(4096)
            if group.rank() == 0:
                tensor[5] = bad
            with tw.step_scope():
                assert not math.isfinite(summed(tensor)[5]), codec
                whole = torch.empty(8192)
                all_gather_single(whole, tensor, group=group)
                assert not math.isfinite(whole[5]), codec
                piece = torch.empty(2048)
                reduce_scatter_single(piece, tensor, group=group)
                assert group.rank() != 0 or not math.isfinite(piece[5]), codec


def test_tensors_outside_of_training_steps_stay_exact() -> None:
    run_ranks(4, strictly, exact_job)


def misuse_job() -> None:
    mesh = mesh_of()
    with pytest.raises(UsageError, match="no axis 'pp', valid are dp, tp"):
        tw.compress_axis(mesh, "pp", "zfp:8")
    with pytest.raises(SpecError, match="is not a codec"):
        tw.compress_axis(mesh, "tp", "zip")
    with pytest.raises(UsageError, match="what is the axis 'x' for"):
        tw.compress_mesh(mesh_of((4,), ("x",)), "hybrid")
    with pytest.raises(SpecError, match="is not a policy"):
        tw.compress_mesh(mesh, "zip")
    with pytest.raises(UsageError, match="takes a module or a pipeline schedule, not int"):
        tw.mark_steps(3)
    with pytest.raises(UsageError, match="takes a module or a pipeline schedule, not SGD"):
        tw.mark_steps(torch.optim.SGD([torch.ones(1)]))
    for wrong in (lambda: tw.compress_axis("tp", "tp", "zfp:8"), lambda: tw.compress_mesh("tp", "hybrid")):
        with pytest.raises(UsageError, match="mesh = 'tp' is no DeviceMesh"):
            wrong()
    with pytest.raises(UsageError, match="group = None is no process group"):
        tw.compress_group(None, "zfp:8")
    with pytest.raises(UsageError, match="no axis 'zz', valid are dp, tp"):
        tw.compress_mesh(mesh, "hybrid", {**ROLES, "zz": "dp"})
    with pytest.raises(SpecError, match="is not a policy"):
        tw.compress_mesh(mesh, None)
    with pytest.raises(SpecError, match="is not a codec"):
        codecs.get(None)
    with pytest.raises(UsageError, match=r"the options that thinwire\.axis_backend"):
        mesh_of(backend_override={"tp": ("thinwire", dist.ProcessGroupGloo._Options())})
    groups = tw.compress_mesh(mesh_of((4,), ("x",)), "zhybrid:24-8", {"x": "dp"})
    assert (str(groups["x"].codecs.reduce), str(groups["x"].codecs.gather)) == ("zfp:8", "zfp:24")
    group = tw.compress_axis(mesh, "tp", "zfp:8", always=True)
    with pytest.raises(UsageError, match="name the rank that sends"):
        group.recv_anysource([torch.empty(4096)])


def test_misuse_is_explained() -> None:
    run_ranks(4, strictly, misuse_job)


def one_stays_plain(connected: bool) -> None:
    group = tw.compress_group(dist.group.WORLD, "zfp:8", axis="dp")  # whose timeout is the job's
    if connected:
        with tw.step_scope():
            dist.all_reduce(torch.ones(4096), group=group)
    if dist.get_rank() != 1:
        with tw.step_scope():
            dist.all_reduce(torch.ones(4096), group=group)
    else:
        dist.all_reduce(torch.ones(4096), group=group)


@pytest.mark.slow
def test_a_rank_that_does_not_encode_is_explained_within_the_timeout() -> None:
    pool = RankPool(2)
    try:
        for connected, what in ((True, "reduce_scatter|all_gather"), (False, "connection")):
            with pytest.raises(RankError) as failure:
                pool.run(one_stays_plain, connected, timeout=40, group_timeout=2)
            assert CollectiveError.__name__ in str(failure.value)
            assert re.search(rf"axis dp: an encoded ({what})", str(failure.value))
            assert "one of them did not encode" in str(failure.value)
    finally:
        pool.close()


# -------------------------------------------------------------------------------------------------- traps


def leave_coalescing_open(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    with _coalescing_manager(group):
        dist.all_reduce(tensor.clone(), group=group)
        raise ZeroDivisionError


def traps_job() -> None:
    mesh = mesh_of()
    group = tw.compress_axis(mesh, "tp", "int8:256")
    mine, rank = values(dist.get_rank(), 4096), group.rank()
    total = mine + values(dist.get_process_group_ranks(group)[1 - rank], 4096)

    # 1. torch looks at the group's own backends, and at its name.
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    assert torch.device("cpu") in group._device_types
    assert mesh.get_group("tp").group_name == group.group_name
    assert dist.get_backend(group) == "gloo"
    assert dist.get_process_group_ranks(group) == mesh["tp"].mesh.tolist()
    by_backend = mesh_of((4,), ("tp",), backend_override={"tp": "thinwire"})
    assert by_backend.get_group().axis == "tp"
    assert dist.get_backend(by_backend.get_group()) == "thinwire"

    # 2. An operation whose C++ code skips Python groups is counted.
    assert group.traffic(reset=True).bypassed == 0
    out = torch.empty(8192)
    torch.ops._c10d_functional.all_gather_into_tensor_out(mine, 2, group.group_name, out=out)
    functional.wait_tensor(out)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        dist.barrier(group=group)
    traffic = group.traffic(reset=True)
    if any(row.op == "all_gather" for row in traffic.rows):  # torch 2.15 asks Python groups, too
        assert (traffic.bypassed, warned) == (0, [])
    else:
        assert traffic.bypassed == 1
        assert "axis tp was bypassed" in str(warned[0].message)
    assert group.traffic().bypassed == 0

    # 3. ReduceOp compares in one direction only: see exact_job. 4. Receive buffers are leaves that require gradients.
    with tw.step_scope():
        if rank == 0:
            dist.send(mine, group=group, group_dst=1)
            dist.send_object_list([{"shape": (4, 5)}], group=group, group_dst=1)
        else:
            leaf = torch.empty(4096, requires_grad=True)
            dist.recv(leaf, group=group, group_src=0)
            assert leaf.is_leaf
            assert 0 < error(leaf.detach(), total - mine) < 0.02
            objects: list[Any] = [None]
            dist.recv_object_list(objects, group=group, group_src=0)
            assert objects == [{"shape": (4, 5)}]

    # ... and a tensor to send may be the result of a collective that nothing has waited for.
    with tw.step_scope():
        unfinished = functional.all_reduce(mine, "sum", group)
        assert type(unfinished) is not torch.Tensor
        receive = dist.irecv(received := torch.empty(4096), group=group, group_src=1 - rank)
        dist.send(unfinished, group=group, group_dst=1 - rank)
        receive.wait()
        assert 0 < error(received, total) < 0.03
        unfinished = functional.all_reduce(mine, "sum", group)
        dist.all_reduce(unfinished, group=group)
        assert error(functional.wait_tensor(unfinished), 2 * total) < 0.03
        gathered = functional_gather_single(functional.all_reduce(mine, "sum", group), 0, group)
        assert error(functional.wait_tensor(gathered), total.repeat(2)) < 0.03

    # 5. Work: waited for twice, from futures chained to it, before and after its end.
    with tw.step_scope():
        tensor = mine.clone()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        chained = work.get_future().then(lambda future: future.value()[0].sum())
        work.wait()
        work.wait()
        assert work.is_success()
        assert torch.equal(chained.wait(), tensor.sum())
        assert torch.equal(work.get_future().wait()[0], tensor)
        many = [dist.all_reduce(i * mine, group=group, async_op=True) for i in range(1, 20)]
        for i, work in reversed(list(enumerate(many, 1))):
            work.wait()
            assert error(work.result()[0], i * total) < 0.02

    # 6. A backward pass is a step, a forward pass is one if it is marked; evaluation is none.
    layer = torch.nn.Linear(64, 64)
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(in_step()))
    layer.register_forward_pre_hook(lambda *_: seen.append(in_step()))
    layer.register_forward_hook(lambda *_: seen.append(in_step()))
    layer(torch.ones(1, 64)).sum().backward()
    assert seen == [False, False, True]
    seen.clear()
    marks = tw.mark_steps(layer)
    layer(torch.ones(1, 64)).sum().backward()
    with torch.no_grad():
        layer(torch.ones(1, 64))
    layer.eval()
    layer(torch.ones(1, 64))
    layer.train()
    assert seen == [True, True, True, False, False, False, False]
    failing = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer(torch.ones(1, 64))
    assert not in_step()
    failing.remove()
    marks.remove()
    seen.clear()
    layer(torch.ones(1, 64))
    assert seen == [False, False]

    # 7. Coalescing blocks: of torch's fast path, of the older kind, and one that an exception has left.
    with tw.step_scope():
        tensors = [mine.clone(), 2 * mine, torch.ones(3)]
        with _coalescing_manager(group):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        assert 0 < error(tensors[0], total) < 0.02
        assert 0 < error(tensors[1], 2 * total) < 0.02
        assert torch.equal(tensors[2], torch.full((3,), 2.0))
        outputs = [torch.empty(8192), torch.empty(6)]
        with _coalescing_manager(group, async_ops=True) as block:
            all_gather_single(outputs[0], mine, group=group)
            all_gather_single(outputs[1], torch.ones(3), group=group)
        block.wait()
        assert error(outputs[0][4096 * rank :][:4096], mine) < 0.02
        assert torch.equal(outputs[1], torch.ones(6))
        with _coalescing_manager(group, async_ops=True) as block:
            reduce_scatter_single(outputs[0][:2048], mine, group=group)
        block.wait()
        assert error(outputs[0][:2048], total[2048 * rank :][:2048]) < 0.02
        tensor = mine.clone()
        with _coalescing_manager(group, device=torch.device("cpu"), async_ops=True) as block:
            dist.all_reduce(tensor, group=group)
        block.wait()
        assert 0 < error(tensor, total) < 0.02
    with pytest.raises(ZeroDivisionError):
        leave_coalescing_open(group, mine)
    assert group in _world.pg_coalesce_state
    with (
        pytest.raises(UsageError, match="left a coalescing block of axis tp open, with 1 collectives"),
        tw.step_scope(),
    ):
        pass
    assert group not in _world.pg_coalesce_state
    with tw.step_scope():
        tensor = mine.clone()
        dist.all_reduce(tensor, group=group)
        assert error(tensor, total) < 0.02

    # 8, adapters: test_stock.py.


def test_the_traps_of_intercepting_groups() -> None:
    run_ranks(4, strictly, traps_job)


def unmarked_job() -> None:
    """A script that marks no step gets a warning that its forward pass is exact."""
    from thinwire.intercept import scope

    scope._state.marked = False
    group = tw.compress_axis(mesh_of(), "tp", "int8:256")
    weight = torch.ones(4096, requires_grad=True)
    functional.wait_tensor(functional.all_reduce(weight.detach(), "sum", group))
    weight.register_hook(lambda gradient: functional.wait_tensor(functional.all_reduce(gradient, "sum", group)))
    with pytest.warns(UserWarning, match="no training step is marked"):
        (weight * 2).sum().backward()
    rows = {(row.op, row.codec, row.why) for row in group.traffic().rows}
    assert rows == {("all_reduce", "none", "outside a step"), ("all_reduce", "int8:256", "")}


def test_a_forward_pass_that_is_not_marked_is_warned_of() -> None:
    run_ranks(4, strictly, unmarked_job)


# -------------------------------------------------------------------------------------------------- bytes


def bytes_job() -> list[tw.AxisTraffic]:
    groups = tw.compress_mesh(mesh_of(), "zhybrid:24-8")
    size = 1 << 14
    with tw.step_scope():
        for name, group in groups.items():
            dist.all_reduce(torch.ones(size), group=group)
            all_gather_single(torch.empty(2 * size), torch.ones(size), group=group)
            reduce_scatter_single(torch.empty(size // 2), torch.ones(size), group=group)
            if name == "tp":
                peer = 1 - group.rank()
                receive = dist.irecv(torch.empty(size), group=group, group_src=peer)
                dist.send(torch.ones(size), group=group, group_dst=peer)
                receive.wait()
    by_axis = tw.axis_traffic()
    assert set(by_axis) == {"dp", "tp"}
    assert tw.axis_traffic(reset=True) == by_axis
    assert all(traffic.sent == 0 for traffic in tw.axis_traffic().values())
    return [by_axis["dp"], by_axis["tp"]]


def test_bytes_of_every_axis_prove_its_codecs() -> None:
    size = 1 << 14
    for data, tensor in run_ranks(4, strictly, bytes_job):
        assert data.codecs == {"zfp:8", "zfp:24"}
        assert tensor.codecs == {"zfp:24"}
        sent = {row.op: (row.plain, row.sent) for row in data.rows}
        eight, all_of_it = (codecs.get(name).max_wire_bytes(size, torch.float32) for name in ("zfp:8", "zfp:24"))
        assert sent["all_reduce"] == (4 * size, eight)
        assert sent["all_gather"] == (4 * size, all_of_it)
        assert sent["reduce_scatter"] == (2 * size, eight // 2)
        assert {row.op: row.sent for row in tensor.rows}["send"] == all_of_it
        assert tensor.encoded("send") == tensor.encoded("recv") == 1
        assert "zfp:24" in str(tensor)


# -------------------------------------------------------------------------------------------------- time


LATE = 0.3


def late_job(codec: str) -> dict[str, float]:
    """Rank 1 comes late to every call, and does everything else at once."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = tw.compress_axis(mesh, "tp", codec)
    assert group.traffic().waited is None
    group.time_waits()
    peer, size = 1 - group.rank(), 1 << 14

    def all_reduce() -> Any:
        return dist.all_reduce(torch.ones(size), group=group, async_op=True)

    def receive() -> Any:
        if group.rank() == 0:
            return dist.irecv(torch.empty(size), group=group, group_src=peer)
        return dist.isend(torch.ones(size), group=group, group_dst=peer)

    calls: dict[str, Callable[[], Any]] = {
        "at once": lambda: dist.all_reduce(torch.ones(size), group=group),
        "later": lambda: all_reduce().wait(),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(torch.ones(size), "sum", group)),
        "message": lambda: receive().wait(),
        "several": lambda: [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(
            dist.isend if group.rank() else dist.irecv, torch.ones(size), group=group, group_peer=peer)])],
        "hidden": lambda: (work := all_reduce(), time.sleep(2 * LATE), work.wait()),
    }  # fmt: skip
    waited = {}
    for name, call in calls.items():
        dist.barrier()
        group.traffic(reset=True)
        time.sleep(LATE * group.rank())
        with tw.step_scope():
            call()
        seconds = group.traffic(reset=True).waited
        assert seconds is not None
        waited[name] = seconds
    return waited


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zfp:24"])
def test_the_time_that_computation_stands_still_is_taken(codec: str) -> None:
    early, late = run_ranks(2, late_job, codec)
    for name in ("at once", "later", "functional", "message", "several"):
        assert 0.6 * LATE < early[name] < 2 * LATE, name
        assert late[name] < 0.5 * LATE, name
    assert early["hidden"] < 0.5 * LATE

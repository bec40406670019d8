"""The transport of GPUs: NCCL's calls over a double of NCCL, and over gloo's own backend, which takes them too."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.nccl_alone import EXPECTED, use_alone
from torch import nn

import thinwire as tw
from thinwire.collectives import group as groups
from thinwire.collectives.group import Meter, Subgroup, control, mesh_group
from thinwire.collectives.links import gloo
from thinwire.collectives.links.nccl import Membership, NcclLinks, joined
from thinwire.collectives.links.transport import agree_on_transport, choose_transport
from thinwire.collectives.point_to_point import point_to_point
from thinwire.errors import CollectiveError, UsageError
from thinwire.program import Lane
from thinwire.program.stages import Stage
from thinwire.sharding.params.plan_codecs import PlanCodecs
from thinwire.testing import RankError, RankPool, check_streams, run_ranks
from thinwire.testing.nccl import Issue, NcclDouble, compare_issues

pytestmark = pytest.mark.ranks

WORLD = 4
TIMEOUT = datetime.timedelta(seconds=3)


def membership(name: str) -> Membership:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    return Membership(name, tuple(range(WORLD)), rank, store, TIMEOUT, torch.device("cpu"))


def double(where: Membership) -> NcclDouble:
    links = gloo.GlooLinks(where.store, where.index, len(where.ranks), gloo.make_device(), where.timeout)
    return NcclDouble(links, where, [], lambda _name, _reads, _writes, body: body())


def real_backend(name: str) -> dist.ProcessGroupGloo:
    """A backend of torch's own, whose methods have the arguments that those of NCCL's have."""
    where = membership(name)
    return dist.ProcessGroupGloo(where.store, where.index, WORLD, TIMEOUT)


def test_neighbours_in_memory_are_not_always_one_tensor() -> None:
    memory = bytearray(24)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=3, offset=offset) for offset in (0, 12))
    assert joined([first, second]) is None
    assert joined(list(torch.zeros(2, 3))) is not None


# -- every call ------------------------------------------------------------------------------------------------


def use_links(kind: str) -> dict[str, object]:
    """Perform each operation of a transport; returns what this rank has received."""
    rank = dist.get_rank()
    links = NcclLinks(double(membership(kind)) if kind == "double" else real_backend(kind), rank)
    side_by_side = torch.full((WORLD, 3), -1.0)
    side_by_side[rank] = rank
    links.gather(list(side_by_side))
    apart = [torch.full((3,), float(rank) if i == rank else -1.0) for i in range(WORLD)]
    links.gather(apart)
    outgoing = [torch.full((rank + i,), 10.0 * rank + i) for i in range(WORLD)]
    incoming = [torch.full((i + rank,), -1.0) for i in range(WORLD)]
    if kind == "double":
        links.exchange(outgoing, incoming)
    else:  # gloo takes the arguments, and refuses the call (torch 2.11) or pieces of different sizes (2.13)
        with pytest.raises(RuntimeError, match="alltoall"):
            links.exchange(outgoing, incoming)
    part = torch.empty(2)
    links.sum_scatter(part, torch.arange(2.0 * WORLD) + rank)
    message = torch.full((5,), float(rank))
    if rank == 1:
        links.send(message, 3)
    if rank == 3:
        links.receive(message, 1)
    dist.barrier()
    links.close()
    return {
        "joined": side_by_side.tolist(),
        "apart": [piece.tolist() for piece in apart],
        "exchanged": [piece.tolist() for piece in incoming],
        "sum": part.tolist(),
        "message": message.tolist(),
    }


@pytest.mark.parametrize("kind", ["double", "gloo"])
def test_every_operation_arrives(kind: str) -> None:
    for rank, received in enumerate(run_ranks(WORLD, use_links, kind)):
        everyone = [[float(i)] * 3 for i in range(WORLD)]
        assert received["joined"] == everyone
        assert received["apart"] == everyone
        sent = [[10.0 * i + rank] * (i + rank) for i in range(WORLD)]
        sent[rank] = [-1.0] * (2 * rank)  # a rank's own piece is not touched
        assert kind == "gloo" or received["exchanged"] == sent
        assert received["sum"] == [WORLD * (2.0 * rank + j) + 6.0 for j in range(2)]
        assert received["message"] == [1.0 if rank == 3 else float(rank)] * 5


def send_and_overwrite() -> float:
    where = membership("overwritten")
    links = gloo.GlooLinks(where.store, where.index, WORLD, gloo.make_device(), where.timeout)
    tensor = torch.full((1 << 20,), float(where.index))
    if where.index == 1:
        links.send(tensor, 3)
        tensor.zero_()
    if where.index == 3:
        time.sleep(0.3)
        links.receive(tensor, 1)
    dist.barrier()
    return float(tensor.mean())


def test_what_was_sent_may_be_overwritten() -> None:
    assert run_ranks(WORLD, send_and_overwrite)[3] == 1.0


def test_a_rank_may_be_alone() -> None:
    """What tests/gpu does with NCCL."""
    assert use_alone(double, torch.device("cpu")) == EXPECTED


# -- the double's rules ----------------------------------------------------------------------------------------


def break_rule(rule: str) -> None:
    rank = dist.get_rank()
    links = NcclLinks(double(membership(rule)), rank)
    pieces = list(torch.zeros(WORLD, 8))
    match rule:
        case "absent":  # sends nothing, so it stays away
            if rank != 2:
                nothing = [piece[:0] for piece in pieces]
                links.exchange([pieces[0] if i == 1 and rank == 0 else nothing[i] for i in range(WORLD)], nothing)
        case "size":
            links.gather([piece[: 7 if rank == 1 else 8].clone() for piece in pieces])
        case "kind":
            if rank == 1:
                links.exchange(pieces, pieces)
            else:
                links.gather(pieces)
        case "place":
            pieces[rank] = torch.zeros(2 * WORLD * 8)[:8]
            flat = torch.zeros(WORLD * 8)
            links._backend._allgather_base(flat, flat[8 * ((rank + 1) % WORLD) :][:8], _options())
        case "dtype":
            links.gather([torch.zeros(2, dtype=torch.int16) for _ in pieces])
        case "not received":
            # The receiver stays: a connection closed at its end would be another error.
            try:
                if rank == 0:
                    links.send(pieces[0], 1)
                    links.close()
            finally:
                store = membership(rule).store
                store.set(f"rank {rank} is through", "")
                store.wait(["rank 0 is through"])
        case "both send first":
            if rank < 2:
                links.send(pieces[0], 1 - rank)
                links.receive(pieces[1], 1 - rank)
        case "aborted":
            links.abort()
            links.gather(pieces)


def _options() -> object:
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    return options


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("absent", "imed out|closed"),
        ("size", "expects"),
        ("kind", "expects"),
        ("place", "not at its own place"),
        ("dtype", "does not know torch.int16"),
        ("not received", "rank 1 has not received message 1 of rank 0"),
        ("both send first", "rank [01] has not received message 1 of rank [01]"),
        ("aborted", "was aborted"),
    ],
)
def test_the_double_holds_to_the_rules_of_nccl(rule: str, sentence: str) -> None:
    with pytest.raises(RankError, match=sentence):
        run_ranks(WORLD, break_rule, rule, timeout=60)


def test_issues_are_compared_for_every_pair() -> None:
    make = Issue((0, 1, 2), "a", "create")
    first, second = Issue((0, 1), "b", "all_gather"), Issue((0, 1, 2), "a", "all_to_all")
    assert compare_issues([[make, first, second], [make, first, second], [make, second]]) == []
    (difference,) = compare_issues([[make, first, second], [make, second, first], [make, second]])
    assert "call 1 of ranks 0 and 1" in difference
    assert "all_gather on b" in difference
    assert len(compare_issues([[make], [], [make]])) == 2


# -- two members -----------------------------------------------------------------------------------------------


def send_between_two() -> float:
    rank = dist.get_rank()
    with check_streams() as check:
        group = Subgroup(tuple(range(WORLD)), Lane.SYNC, Stage.GATHER_INSIDE, torch.device("cpu"), Meter())
        assert group.native
        value = torch.full((4,), float(rank))
        if rank in (0, 2):  # the others need not call
            point_to_point(group, value, 2, 0).perform()
    assert not check.hazards
    return float(value.sum())


def test_a_message_concerns_two_ranks() -> None:
    assert run_ranks(WORLD, send_between_two, timeout=30) == [8.0, 4.0, 8.0, 12.0]


# -- names -----------------------------------------------------------------------------------------------------


def use_groups_after(mine: Callable[[int], None]) -> list[float]:
    rank = dist.get_rank()
    mine(rank)
    mesh = mesh_group([rank - rank % 2, rank - rank % 2 + 1], "tp")
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=mesh)
    half = control([0, 1] if rank < 2 else [2, 3])
    plan = tw.Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32")
    model = tw.shard(nn.Linear(4, 4), plan)
    model(torch.ones(1, 4)).sum().backward()
    return [float(value), *half.all_reduce_mean([float(rank)])]


def make_a_group_on_some_ranks(rank: int) -> None:
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)


def test_groups_of_the_user_do_not_disturb_names() -> None:
    results = run_ranks(WORLD, use_groups_after, make_a_group_on_some_ranks, timeout=30)
    assert results == [[1.0, 0.5], [1.0, 0.5], [5.0, 2.5], [5.0, 2.5]]


# -- the choice of a transport ---------------------------------------------------------------------------------


def choose_together(gpus: list[str]) -> str:
    rank = dist.get_rank()
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    return agree_on_transport(store, rank, WORLD, gpus[rank], datetime.timedelta(seconds=10))


def test_ranks_with_one_visible_gpu_each_use_nccl() -> None:
    # A scheduler may show each rank of a host one GPU only: what counts is whether two ranks use the same one.
    assert set(run_ranks(WORLD, choose_together, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])) == {"cpu:gloo,cuda:nccl"}


def test_ranks_that_share_a_gpu_use_gloo_and_are_told() -> None:
    assert set(run_ranks(WORLD, choose_together, ["GPU-a", "GPU-b", "GPU-a", "GPU-b"])) == {"gloo"}
    backend, problem, warning = choose_transport(["GPU-a", "GPU-b", "GPU-a", "GPU-b"])
    assert (backend, problem) == ("gloo", "")
    assert "ranks [0, 2] share GPU GPU-a" in warning
    assert choose_transport([""] * 3) == ("gloo", "", "")


def test_ranks_without_a_gpu_among_others_are_named_on_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(WORLD, choose_together, ["GPU-a", "GPU-b", "", ""])
    assert all(text and "ranks [2, 3] have no GPU" in text for text in caught.value.tracebacks)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_for_each_other_no_longer_than_they_are_told(rank: int) -> None:
    store = dist.HashStore()  # its own patience is 300 s
    with pytest.raises(UsageError, match=rf"rank {rank} has waited 1 s for the other 1 ranks"):
        agree_on_transport(store, rank, 2, "", datetime.timedelta(seconds=1))


# -- errors ----------------------------------------------------------------------------------------------------


def fail_in_a_step(kind: str) -> tuple[int, int, str]:
    """One rank fails. Returns how many communicators this rank has made and aborted, and the error that it raises."""
    aborted: list[NcclDouble] = []
    abort, message = NcclDouble.abort, ""

    def note_and_abort(communicator: NcclDouble) -> None:
        aborted.append(communicator)
        abort(communicator)

    with check_streams() as check, mock.patch.object(NcclDouble, "abort", note_and_abort):
        model = tw.shard(nn.Linear(4, 4), tw.Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32"))
        try:
            if kind == "user's own":
                raise ValueError(kind)
            if kind == "none" or dist.get_rank() > 0:
                model(torch.ones(1, 4)).sum().backward()
        except (ValueError, CollectiveError) as error:
            message = str(error)
            groups.shutdown()
        else:
            groups.shutdown()
    return sum(issue.what == "create" for issue in check.issues), len(aborted), message


@pytest.mark.slow
def test_errors_abort_what_is_queued() -> None:
    for made, aborted, _ in run_ranks(WORLD, fail_in_a_step, "user's own", timeout=60):
        assert made == aborted > 0
    for made, aborted, message in run_ranks(WORLD, fail_in_a_step, "none", timeout=60):
        assert (made > 0, aborted, message) == (True, 0, "")


@pytest.mark.slow
def test_an_exchange_that_fails_aborts_the_others() -> None:
    pool = RankPool(WORLD)
    try:
        outcomes = pool.run(fail_in_a_step, "left", timeout=60, group_timeout=3)
    finally:
        pool.close()
    for made, aborted, message in outcomes[1:]:
        assert aborted >= made > 0
        assert "on the gather lane with ranks" in message


# -- what precedes the first step -------------------------------------------------------------------------------


def note_warm_ups() -> list[tuple[str, str]]:
    """The plan and the device of each warm-up of codecs before a model is sharded."""
    noted: list[tuple[str, str]] = []

    def note(_codecs: PlanCodecs, plan: tw.Plan, device: torch.device) -> None:
        noted.append((plan.fingerprint(), device.type))

    with mock.patch.object(PlanCodecs, "warm_up", note):
        tw.shard(nn.Linear(4, 4), tw.Plan.preset("zeropp", nodes=2, local=2, compute_dtype="float32"))
    return noted


def test_codecs_are_warmed_up_before_a_step_needs_them() -> None:
    plan = tw.Plan.preset("zeropp", nodes=2, local=2, compute_dtype="float32")
    assert run_ranks(WORLD, note_warm_ups) == [[(plan.fingerprint(), "cpu")]] * WORLD

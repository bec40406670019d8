"""A plan's ``topology`` puts ranks in order at start; numbers, data and checkpoints do not depend on the order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.training.edge import TOLERANCE, build, close, gap, raised, samples, whole
from tests.support.training.models import Stack
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import thinwire as tw
from thinwire.collectives import group
from thinwire.collectives.group import recording
from thinwire.collectives.links import gloo
from thinwire.collectives.links.nccl import Membership, replace_nccl
from thinwire.errors import MismatchError, SpecError
from thinwire.network import finding
from thinwire.network.order import order_ranks
from thinwire.network.pairings import num_rounds
from thinwire.parallel import parallelize
from thinwire.program import Scope
from thinwire.sharding.api import runtime
from thinwire.spec import Factor
from thinwire.testing import run_ranks
from thinwire.testing.nccl import Issue, NcclDouble

pytestmark = pytest.mark.ranks


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A file with the hosts of four nodes and their leaves."""
    (tmp_path / "hosts").write_text("a left\nb right\nc left\nd right\n")
    return tmp_path / "hosts"


def asked(topology: Path | str | None) -> tw.Plan:
    """OS over two of four nodes: the axis that should stay below a leaf."""
    return tw.Plan.preset(
        "zero1-node",
        nodes=4,
        local=1,
        group="1x2",
        compute_dtype="float32",
        topology=None if topology is None else str(topology),
    )


def on_hosts(names: str) -> None:
    """Make this rank one of a host with a name of its own, as SLURM does."""
    os.environ["SLURMD_NODENAME"] = names[dist.get_rank()]


def train(model: nn.Module, plan_position: int, steps: range) -> None:
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    for number in steps:
        model(samples(number, 1, 4)[0, plan_position]).square().mean().backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()


def check_order(hosts: Path) -> None:
    on_hosts("abcd")
    models = {}
    for source in (None, hosts):
        model = tw.shard(build(Stack), asked(source))
        sharded = runtime(model).sharded
        with recording() as records:
            train(model, sharded.position, range(2))
        pairs = {record.ranks for record in records if record.scope is Scope.ACROSS and len(record.ranks) == 2}
        heavy = {tuple(sorted(ranks)) for ranks in pairs if sum(ranks) % 2 == 0} if source else {(0, 1), (2, 3)} & pairs
        assert heavy, f"no group below a leaf: {pairs}"
        models[source] = whole(model)
        assert sharded.plan.topology is None
        assert sharded.plan.placement == (None if source is None else (0, 2, 1, 3))
        close(model)
    assert gap(models[None], models[hosts]) == 0.0, "the same positions computed the same"
    model = parallelize(build(Stack), asked(hosts))
    assert model.grid.data == (0, 2, 1, 3).index(dist.get_rank()), "data follow positions"
    ordered = order_ranks(asked(hosts), group.control(), torch.device("cpu"))
    assert ordered.hosts == ("a", "c", "b", "d")
    assert "2 above 4 nodes; 33% of the bytes between nodes cross leaves, 67% in" in ordered.sentence


def test_ranks_are_put_in_order_and_numbers_stay(hosts: Path) -> None:
    run_ranks(4, check_order, hosts)


def check_refusals(hosts: Path) -> None:
    def refused(plan: tw.Plan, mesh: DeviceMesh | None = None) -> str:
        return raised(SpecError, functools.partial(tw.shard, mesh=mesh), build(Stack), plan)

    on_hosts("abcx")
    assert f"topology = '{hosts}': {hosts} has no line for x" in refused(asked(hosts))
    missing = hosts.with_name("missing")
    assert f"topology = '{missing}': {missing} cannot be read" in refused(asked(missing))
    os.environ["PATH"] = ""
    os.environ["SLURM_CONF"] = str(missing)
    assert "topology = 'slurm': scontrol is not on the PATH" in refused(asked("slurm"))
    # Ranks 0 and 1 share node 0 of the mesh, but not a host.
    cyclic = tw.Plan.preset("zero3", nodes=2, local=2, topology=str(hosts))
    assert "ranks 0 to 1 of node 0 run on a, b: start ranks host by host" in refused(cyclic)
    mesh = DeviceMesh("cpu", [2, 3, 0, 1])
    own = "the mesh has an order of its own, [2, 3, 0, 1]: give its ranks in ascending order"
    assert own in refused(asked(hosts), mesh)


def check_few_nodes() -> None:
    """Any order of two nodes is the same, so nothing is timed."""
    ordered = order_ranks(
        tw.Plan.preset("zero3", nodes=2, local=1, topology="timed"), group.control(), torch.device("cpu")
    )
    assert (ordered.plan.topology, ordered.plan.placement) == (None, None)
    assert ordered.sentence == "pairs were not timed: any order of 2 nodes is the same"


def test_two_nodes_need_no_timing() -> None:
    run_ranks(2, check_few_nodes)


def test_what_cannot_be_ordered_is_refused_on_every_rank(hosts: Path) -> None:
    run_ranks(4, check_refusals, hosts)


def check_mismatch(hosts: Path) -> None:
    on_hosts("abcd")
    mine = asked(hosts if dist.get_rank() == 2 else None)
    assert "have different plans" in raised(MismatchError, tw.shard, build(Stack), mine)


def test_ranks_with_and_without_a_topology_say_so(hosts: Path) -> None:
    run_ranks(4, check_mismatch, hosts)


def check_parts(hosts: Path) -> None:
    """Parts of a model that are sharded one by one get the same order."""
    on_hosts("abcd")
    model = build(Stack)
    chosen = asked(hosts)
    first = next(iter(model.children()))
    tw.shard(first, chosen)
    tw.shard(model, chosen)
    assert runtime(model).sharded.plan.placement == (0, 2, 1, 3)
    close(model)


def test_parts_share_an_order(hosts: Path) -> None:
    run_ranks(4, check_parts, hosts)


def check_checkpoints(hosts: Path, path: Path) -> None:
    """A checkpoint written in one order is loaded in another."""
    on_hosts("abcd")
    kept = {}
    for saving, loading in ((None, None), (hosts, None), (None, hosts)):
        model = tw.shard(build(Stack), asked(saving))
        train(model, runtime(model).sharded.position, range(2))
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        tw.save(model, optim, path)
        before = whole(model)
        close(model)
        model = tw.shard(build(Stack, seed=1), asked(loading))
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        tw.load(model, optim, path)
        assert gap(whole(model), before) <= TOLERANCE
        kept[saving, loading] = whole(model)
        close(model)
    first, *others = kept.values()
    assert all(gap(other, first) <= TOLERANCE for other in others)


@pytest.mark.slow
def test_checkpoints_do_not_depend_on_the_order(hosts: Path, tmp_path: Path) -> None:
    run_ranks(4, check_checkpoints, hosts, tmp_path / "checkpoint")


def check_calls(native: bool) -> tuple[object, list[str]]:
    """Time pairs of three nodes, one of which rests in each round; returns what was found and this rank's calls."""
    finding.TURN = 2e-3  # what is found on one machine is noise; here, only calls count
    issues: list[Issue] = []

    def make(where: Membership) -> NcclDouble:
        links = gloo.GlooLinks(where.store, where.index, len(where.ranks), gloo.make_device(), where.timeout)
        return NcclDouble(links, where, issues, lambda _name, _reads, _writes, body: body())

    with replace_nccl(make) if native else contextlib.nullcontext():
        found = finding.find_leaves(group.control(), Factor(local=1, nodes=3), torch.device("cpu"))
    assert set(found.pairs) == {(0, 1), (0, 2), (1, 2)}
    assert sorted(node for leaf in found.leaves for node in leaf) == [0, 1, 2]
    assert found.rounds >= num_rounds(3)
    return dataclasses.replace(found, seconds=0.0), [issue.what for issue in issues]


@pytest.mark.parametrize("native", [False, True])
def test_all_ranks_make_the_same_calls_and_find_the_same(native: bool) -> None:
    first, *others = run_ranks(3, check_calls, native)
    assert all(other == first for other in others)
    assert bool(first[1]) is native

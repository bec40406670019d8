"""Clusters of unlike nodes: what their file means, how fast groups of ranks send, and the step of the slowest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.reference import UNLIKE
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cost import NominalRates
from thinwire.errors import SpecError
from thinwire.plan import TrainingJob, candidate, search
from thinwire.spec import ClusterSpec, Fabric, ModelSpec, Plan, first_nodes
from thinwire.spec.machines.nodes import Link

MODEL = ModelSpec.preset("llama-7b").with_(layers=4)


def cluster(*groups: dict[str, Any], **keys: Any) -> ClusterSpec:
    return ClusterSpec.parse({"groups": groups, **keys})


def group(name: str = "a100-80g", nodes: int = 2, **keys: Any) -> dict[str, Any]:
    return {"accelerator": name, "nodes": nodes, **keys}


def step(machine: ClusterSpec, plan: Plan) -> float:
    job = TrainingJob(MODEL, machine, 32 * 2048 * 2, 2048, rates=NominalRates(machine))
    return candidate(job, plan.with_(micro_batch=1, micro_batches=2)).seconds


def test_the_example_of_the_reference_survives_writing_and_reading() -> None:
    machine = ClusterSpec.from_toml(UNLIKE)
    assert ClusterSpec.from_toml(machine.to_toml()) == machine
    assert (machine.nodes, machine.gpus_per_node, machine.group_of_nodes) == (4, 8, (0, 0, 1, 1))
    new, old = machine.groups
    assert machine.memory == new.memory == min(new.memory or 0, old.memory or 0)
    assert machine.peak_flops == old.peak_flops
    assert machine.links.nic.bandwidth == 400e9
    assert machine.price_per_gpu_hour == pytest.approx((4.0 + 1.5) / 2)


@pytest.mark.parametrize("name", ClusterSpec.preset_names())
def test_a_file_that_names_an_accelerator_has_its_figures(name: str) -> None:
    preset = ClusterSpec.preset(name, nodes=4)
    assert ClusterSpec.parse({"accelerator": name, "nodes": 4}) == preset.with_(name=None, accelerator=name)


def test_the_slowest_link_to_a_host_is_that_of_the_cluster() -> None:
    machine = cluster(group("h100-80g"), group("v100-32g"), gpus_per_node=8)
    assert machine.links.host == ClusterSpec.preset("v100-32g", nodes=1).links.host
    own = cluster(group("v100-32g"), links={"host": {"bandwidth": "1GB/s"}})
    assert own.links.host.bandwidth == 8e9


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("= 1.5", "= -1.5", "groups.1.price_per_gpu_hour = -1.5: it should be greater than 0"),
        ("nodes = 2", "nodes = 2\ngpus_per_node = 0", "groups.0.gpus_per_node = 0: it should be greater than or equal"),
        ("nodes = 2", "nodes = 0", "groups.0.nodes = 0: it should be greater than or equal to 1"),
        ("nodes = 2", "nodes = 2\ngpus_per_node = 4", "groups.0.gpus_per_node = 4 differs from 8 of other nodes"),
        ("discount = 0.6", "discount = 1.6", "groups.1.spot.discount = 1.6: it should be less than 1"),
        ("per_hour = 0.02", "per_hour = -1.0", "spot.interruptions_per_hour = -1.0: it should be greater than or"),
        ('mtbf = "2000h"', 'mtbf = "0h"', "failures.mtbf = '0h': it should be greater than 0"),
        ('checkpoint = "20s"', "checkpoint = 0", "failures.checkpoint = 0: it should be greater than 0"),
        ('"a100-80g"', '"a100"', "groups.1.accelerator = 'a100' is unknown; valid are a800-80g"),
        ("zone = {", "leaf = {", "links.zone is missing: the groups are in the zones 'east', 'west'"),
        ('"10gbit"', '"10 bananas"', "unknown unit 'bananas'"),
    ],
)
def test_bad_input_is_one_sentence(before: str, after: str, sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        ClusterSpec.from_toml(UNLIKE.replace(before, after, 1) if before != "nodes = 2" else _in_group(after))
    assert len(error.value.problems) == 1
    assert sentence in str(error.value)


def _in_group(text: str) -> str:
    return UNLIKE.replace("nodes = 2", text, 1)


def test_changes_keep_the_proportion_of_groups() -> None:
    machine = ClusterSpec.from_toml(UNLIKE)
    doubled = machine.with_(
        links={"nic": machine.links.nic.with_(bandwidth=800e9)}, nodes=8, memory=machine.memory // 2
    )
    assert [known.nic.bandwidth for known in doubled.groups if known.nic] == [6400e9, 800e9]
    assert [known.nodes for known in doubled.groups] == [4, 4]
    assert doubled.memory == machine.memory // 2
    with pytest.raises(SpecError, match="the groups have 4 nodes"):
        machine.with_(nodes=6)
    assert first_nodes(machine, 3).group_of_nodes == (0, 0, 1)
    assert first_nodes(machine, 2).peak_flops == machine.groups[0].peak_flops
    with pytest.raises(SpecError, match="describes 4 nodes"):
        first_nodes(machine, 5)


def test_a_collective_goes_at_the_slowest_member_of_its_group() -> None:
    machine = cluster(
        group(nodes=2, nic={"bandwidth": "800gbit"}, zone="a"),
        group(nodes=2, nic={"bandwidth": "100gbit"}, zone="b"),
        links={"zone": {"bandwidth": "10gbit", "latency": "1ms"}},
    )
    fast, slow, everywhere = Fabric(machine, 0), Fabric(machine, 1), Fabric(machine)
    assert fast.route(2).bandwidth == 800e9
    assert slow.route(2).bandwidth == everywhere.route(2).bandwidth == 100e9
    # Over all nodes, a ring leaves each zone once from its two nodes: 20 Gbit/s for that one.
    assert fast.route(4).bandwidth == slow.route(4).bandwidth == pytest.approx(20e9)
    # Every second node: members are in different zones, and both nodes of a zone send across.
    assert fast.route(2, 2).bandwidth == pytest.approx(10e9)
    assert fast.route(2, 2).latency == pytest.approx(1e-3 + 10e-6)


def test_equal_groups_are_an_ordinary_cluster() -> None:
    one = ClusterSpec.preset("a100-80g", nodes=4)
    same = cluster(group(nodes=1), group(nodes=3))
    for name in ("zero1-node", "zero3", "mics"):
        plan = Plan.preset(name, nodes=4, local=8)
        assert step(same, plan) == pytest.approx(step(one, plan), rel=1e-12)


def test_the_step_is_that_of_the_slowest_rank() -> None:
    plan = Plan.preset("zero3", nodes=4, local=8)
    new, old = (ClusterSpec.preset(name, nodes=4) for name in ("h100-80g", "a100-80g"))
    mixed = cluster(group("h100-80g", 3), group("a100-80g", 1))
    assert step(mixed, plan) == pytest.approx(step(old, plan), rel=1e-9)
    assert step(new, plan) < 0.6 * step(old, plan)
    rates = NominalRates(mixed)
    assert len(rates.views) == 2
    # A group that computes slowly and one whose links are slow: neither alone is the whole step of a uniform cluster.
    unlike = cluster(group("a100-80g", 2), group("h100-80g", 2, inside={"bandwidth": "100gbit"}))
    local = Plan.preset("mics", nodes=4, local=8)
    worst = ClusterSpec.preset("a100-80g", nodes=4, links={"inside": {"bandwidth": 100e9, "latency": 3e-6}})
    assert step(old, local) <= step(unlike, local) < step(worst, local)


@pytest.mark.slow
def test_the_search_keeps_slow_links_out_of_frequent_collectives() -> None:
    machine = ClusterSpec.from_toml(UNLIKE)
    equal = ClusterSpec.preset("a100-80g", nodes=4)
    job = TrainingJob(
        MODEL, machine, 32 * 2048, 2048, micro_batch=1, recompute=False, codecs="none", rates=NominalRates(machine)
    )
    chosen = search(job, top=3).candidates[0]
    assert chosen.plan.params.nodes <= 2  # inside a zone
    assert search(replace(job, cluster=equal, rates=NominalRates(equal)), top=3).candidates[0].seconds < chosen.seconds


def test_commands_take_the_file(tmp_path: Path) -> None:
    path = tmp_path / "unlike.toml"
    path.write_text(UNLIKE)
    outcome = CliRunner().invoke(app, ["sim", "--model", "llama-7b", "--cluster", str(path), "--plan", "preset:mics"])
    assert outcome.exit_code == 0, outcome.output
    assert "two generations" in outcome.output
    refused = CliRunner().invoke(
        app, ["plan", "--model", "llama-7b", "--cluster", str(path), "--tokens-per-step", "2M", "--memory", "40GiB"]
    )
    assert refused.exit_code == 1
    assert "change the groups in the file" in refused.output.replace("\n", " ")


def test_a_link_keeps_the_published_latency_beside_another_bandwidth() -> None:
    published = ClusterSpec.preset("a800-80g", nodes=2)
    slow = {"nic": {"bandwidth": "25gbit"}}
    group = {"accelerator": "a800-80g", "nodes": 2, **slow}
    one = {"accelerator": "a800-80g", "nodes": 2, "links": slow}
    changed = published.with_(links=slow)
    assert changed.links.nic == Link(bandwidth=25e9, latency=published.links.nic.latency)
    assert ClusterSpec.preset("a800-80g", nodes=2, links=slow) == changed
    assert ClusterSpec.parse(one).links == changed.links
    assert ClusterSpec.parse({"groups": [group]}).links.nic == changed.links.nic
    assert published.with_(links={"nic": {"latency": "5us"}}).links.nic.bandwidth == published.links.nic.bandwidth

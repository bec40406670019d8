"""Topologies: SLURM's notations, files of hosts, and the order of nodes that crosses leaves least."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.slurm import needs_slurm, slurm
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cli.planning.plan import _leaves_of_hosts
from thinwire.errors import SpecError, UsageError
from thinwire.network.slurm import slurm_topology
from thinwire.program import crossing_bytes, least_crossing, lower, traffic_across
from thinwire.program.ordering import _nominal_units
from thinwire.spec import Factor, Plan
from thinwire.spec.machines.slurm import expand_hosts
from thinwire.spec.machines.topology import SwitchTree, host_lines
from thinwire.spec.recipe import Recipe

CONFIGURATION = """\
# two rows
SwitchName=leaf1 Nodes=node[01-04,09]
SwitchName=leaf2 Nodes=node[05-08],gpu-a[1-2] LinkSpeed=100
switchname=row1 Switches=leaf[1-2]
SwitchName=leaf3 \\
    Nodes=node1[0-2]
SwitchName=row2 Switches=leaf3
SwitchName=top Switches=row[1-2]
"""

SHOWN = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[01-04,09]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node[05-08],gpu-a[1-2]
SwitchName=row1 Level=1 LinkSpeed=1 Nodes=gpu-a[1-2],node[01-09] Switches=leaf[1-2]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=node1[0-2]
SwitchName=row2 Level=1 LinkSpeed=1 Nodes=node[10-12] Switches=leaf3
SwitchName=top Level=2 LinkSpeed=1 Nodes=gpu-a[1-2],node[01-12] Switches=row[1-2]
"""
"""What scontrol of SLURM 22.05 prints for it."""

LISTS = {
    "node[01-03,20]": ("node01", "node02", "node03", "node20"),
    "a,b[8-11],c": ("a", "b8", "b9", "b10", "b11", "c"),
    "rack[1-2]n[09-10]": ("rack1n09", "rack1n10", "rack2n09", "rack2n10"),
    "n[098-101]": ("n098", "n099", "n100", "n101"),
    "login": ("login",),
}


@pytest.mark.parametrize(("text", "hosts"), LISTS.items())
def test_lists_of_hosts_are_expanded(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 40)), min_size=1, max_size=5), st.integers(1, 5))
def test_ranges_hold_every_number_once(ranges: list[tuple[int, int]], width: int) -> None:
    text = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more in ranges)
    expected = [f"n{number:0{width}d}" for first, more in ranges for number in range(first, first + more + 1)]
    assert list(expand_hosts(f"n[{text}]")) == expected


@pytest.mark.parametrize("text", ["node[1-", "node1]", "node[[1]]", "node[a-b]", "node[3-1]", "node[]"])
def test_malformed_lists_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"is no list of hosts such as node\[01-03,20\],gpu-a\[1-2\]: "):
        expand_hosts(text)


def test_the_tree_is_read_from_the_configuration_and_from_scontrol() -> None:
    configured, shown = SwitchTree.parse(CONFIGURATION, "conf"), SwitchTree.parse(SHOWN, "scontrol")
    assert configured.switches == shown.switches
    assert configured.switches["gpu-a2"] == ("leaf2", "row1", "top")
    assert len(configured.switches) == 14
    # Hosts below one switch follow each other, at every level.
    for level in range(3):
        names = [switches[level] for switches in configured.switches.values()]
        assert len([*itertools.groupby(names)]) == len(set(names))


def test_blocks_are_leaves_and_larger_blocks_join_them() -> None:
    configured = SwitchTree.parse(
        "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockName=b3 Nodes=n[5-6]\nBlockSizes=2,4\n", "conf"
    ).switches
    assert [configured[f"n{i}"][0] for i in range(1, 7)] == ["b1", "b1", "b2", "b2", "b3", "b3"]
    assert configured["n1"][1] == configured["n4"][1] != configured["n5"][1]
    shown = SwitchTree.parse(
        "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2\n"
        "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4\n",
        "scontrol",
    ).switches
    assert shown == {"n1": ("b1", "b[1-2]"), "n2": ("b1", "b[1-2]"), "n3": ("b2", "b[1-2]"), "n4": ("b2", "b[1-2]")}


@pytest.mark.parametrize("text", ["SwitchName=top Switches=a\n", "BlockSizes=4\n", "SwitchName=a Switches=a\n"])
def test_switches_without_hosts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="names no switch or block with nodes below it"):
        SwitchTree.parse(text, "conf")


def test_files_name_hosts_and_what_is_above(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a left row1\nb right.x row1 # far\n")
    assert SwitchTree.read(path).switches == {"a": ("left", "row1"), "b": ("right.x", "row1")}
    path.write_text(host_lines({"left": ["a", "c"], "right": ["b"]}, comment="found"))
    assert SwitchTree.read(path).leaf_of == {"a": "left", "c": "left", "b": "right"}
    path.write_text(CONFIGURATION)
    assert SwitchTree.read(path).leaf_of["node12"] == "leaf3"
    path.write_text("# nothing\n")
    with pytest.raises(SpecError, match="names no host"):
        SwitchTree.read(path)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        SwitchTree.read(tmp_path / "missing")


def test_hosts_are_found_by_their_short_names() -> None:
    topology = SwitchTree({"a.cluster": ("left",), "b": ("right",), "c.one": ("x",), "c.two": ("y",)}, "hosts")
    assert topology.above(["b.cluster", "a", "b"]) == [("right",), ("left",), ("right",)]
    with pytest.raises(
        SpecError, match=r"has no line for c, d; it names 4 hosts, such as a\.cluster, b, c\.one, c\.two"
    ):
        topology.above(["a", "c", "d"])


def plan(nodes: int, *, optimizer: int, params: int = 1, local: int = 2) -> Plan:
    def factor(count: int) -> Factor:
        return Factor(local=local if count > 1 else 1, nodes=count)

    return Plan(
        mesh=Factor(local=local, nodes=nodes), params=factor(params), grads=factor(params), optimizer=factor(optimizer)
    )


def test_nodes_of_a_leaf_become_neighbours() -> None:
    order, crossing, given = least_crossing(plan(4, optimizer=2), [("x",), ("y",), ("x",), ("y",)])
    assert order == (0, 2, 1, 3)
    assert crossing < given


def test_nodes_of_a_leaf_stand_at_the_same_place_of_every_block_if_most_bytes_travel_between_blocks() -> None:
    narrow = {"scatter": "int4:256", "spread": "int4:256"}
    asked = Plan.preset("zero1", nodes=4, local=2, optimizer="2x2", wire=narrow)
    order, crossing, given = least_crossing(asked, [("x",), ("x",), ("y",), ("y",)])
    assert order == (0, 2, 1, 3)
    assert crossing < 0.6 * given


def test_an_order_that_is_as_good_as_any_is_kept() -> None:
    for leaves in ("xxyy", "xxxx", "xyzw"):
        order, crossing, given = least_crossing(plan(4, optimizer=2), [(leaf,) for leaf in leaves])
        assert order == (0, 1, 2, 3)
        assert crossing == given


def test_upper_switches_decide_between_leaves() -> None:
    """Four leaves of one host, in two rows: groups of two stay below a row."""
    switches = [("a", "row1"), ("b", "row2"), ("c", "row1"), ("d", "row2")]
    assert least_crossing(plan(4, optimizer=2), switches)[0] == (0, 2, 1, 3)
    # Racks of different rows may have the same name.
    same = [("rack1", "row1"), ("rack1", "row2"), ("rack2", "row1"), ("rack2", "row2")]
    assert least_crossing(plan(4, optimizer=2), same)[0] == (0, 2, 1, 3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from("xyz"), min_size=6, max_size=6), st.sampled_from([(1, 2), (1, 3), (2, 6), (3, 3)]))
def test_no_order_crosses_much_less(leaves: list[str], factors: tuple[int, int]) -> None:
    """Against all orders of six nodes."""
    asked = plan(6, params=factors[0], optimizer=factors[1])
    traffic = traffic_across(lower(asked, _nominal_units(asked)))
    numbers = ["xyz".index(leaf) for leaf in leaves]
    order, crossing, given = least_crossing(asked, [(leaf,) for leaf in leaves])
    found = crossing_bytes(traffic, [numbers[node] for node in order])
    best = min(crossing_bytes(traffic, leaf_order) for leaf_order in set(itertools.permutations(numbers)))
    assert sorted(order) == list(range(6))
    assert crossing <= given
    assert found <= best * 1.25 + 1e-9


def test_plans_refuse_what_cannot_be_ordered() -> None:
    with pytest.raises(SpecError, match="topology = 'slurm' and placement both order the ranks; leave one of them out"):
        plan(2, optimizer=2).with_(topology="slurm", placement=(0, 1, 2, 3))
    with pytest.raises(SpecError, match="topology = 'hosts' with tp = 2 and pp = 1: there the launcher's order"):
        plan(2, optimizer=2).with_(topology="hosts", tp=2)


def test_recipes_name_topologies_relative_to_their_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for written, read in (("hosts", str(tmp_path / "hosts")), ("auto", "auto"), ("slurm", "slurm"), ("timed", "timed")):
        path.write_text(
            f'plan = {{ preset = "zero1", topology = "{written}" }}\n[model]\npreset = "llama-7b"\n[train]\nsteps = 1\n'
        )
        assert Recipe.read(path).plan["topology"] == read


def test_slurm_without_an_answer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"scontrol is not on the PATH, and there is no .*topology\.conf"):
        slurm_topology({"PATH": str(tmp_path), "SLURM_CONF": str(tmp_path / "slurm.conf")})
    (tmp_path / "topology.conf").write_text(CONFIGURATION)
    beside = slurm_topology({"PATH": str(tmp_path), "SLURM_CONF": str(tmp_path / "slurm.conf")})
    assert beside.switches == SwitchTree.parse(CONFIGURATION, "").switches
    scontrol = tmp_path / "scontrol"
    path = f"{tmp_path}:/usr/bin:/bin"
    scontrol.write_text(f"#!/bin/sh\ncat <<'END'\n{SHOWN}END\n")
    scontrol.chmod(0o755)
    assert slurm_topology({"PATH": path}).switches == beside.switches
    scontrol.write_text("#!/bin/sh\necho 'scontrol: error: No topology information available' >&2\n")
    with pytest.raises(UsageError, match="names no switches; it said: scontrol: error: No topology information"):
        slurm_topology({"PATH": path})


@pytest.mark.slow
@needs_slurm
def test_real_slurm_says_the_same(tmp_path: Path) -> None:
    nodes = expand_hosts("node[01-12],gpu-a[1-2]")
    with slurm(tmp_path, nodes, CONFIGURATION, run_nodes=False) as environment:
        shown = slurm_topology(environment)
    assert shown.source == "scontrol show topology"
    assert shown.switches == SwitchTree.parse(CONFIGURATION, "").switches


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize("text", LISTS)
def test_real_slurm_expands_lists_alike(text: str, tmp_path: Path) -> None:
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=fake\nSlurmctldHost=localhost\n")
    command = ["scontrol", "show", "hostnames", text]
    shown = subprocess.run(
        command, env={**os.environ, "SLURM_CONF": str(configuration)}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == list(expand_hosts(text))


def test_the_planner_takes_the_hosts_of_a_job_from_slurm_s_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(CONFIGURATION)
    assert len(_leaves_of_hosts(path)) == 14
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[01,05,02,06]")
    assert _leaves_of_hosts(path) == {"node01": "leaf1", "node05": "leaf2", "node02": "leaf1", "node06": "leaf2"}
    path.write_text("node01 left\nnode05 right\n")  # a file of one's own is the job's
    assert _leaves_of_hosts(path) == {"node01": "left", "node05": "right"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "hosts"], "thinwire topology with 1 nodes: any order of less than three nodes is the same"),
        (["--topology", "hosts"], "thinwire profile --topology hosts is now thinwire topology hosts"),
        ([], "--out PROFILE.json is missing: the file to write"),
    ],
)
def test_profiles_without_sense_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["profile", *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "hosts").exists()

"""From samples to rows, refusals and ratios; the order of turns; options that the command line refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.errors import SpecError, UsageError
from thinwire_bench.peers import catalog
from thinwire_bench.peers.catalog import PEERS, peer_systems, plan_systems
from thinwire_bench.peers.interface import SystemKind, SystemSpec
from thinwire_bench.systems.controller import TurnResult
from thinwire_bench.systems.interleave import Sample, Session, Setting, interleave
from thinwire_bench.systems.protocol import TurnRequest
from thinwire_bench.systems.ratios import goals, ratios
from thinwire_bench.systems.rows import SystemRow, early_losses, make_rows, refusals
from thinwire_bench.systems.step_chart import draw
from thinwire_bench.systems.table import goals_table, tables

FREE = Setting("none", None, None)
SLOW = Setting("8mbit", 8e6, None)
SLOW_CLIPPED = Setting("8mbit", 8e6, 1.0)
CLIPPED = Setting("none", None, 1.0)

SYSTEMS = [
    SystemSpec("local", "m:f", kind=SystemKind.BOUND),
    SystemSpec("fsdp2", "m:f"),
    SystemSpec("ddp", "m:f"),
    SystemSpec("tw:zero3", "m:f", kind=SystemKind.PLAN),
]


class FakeRunner:
    """Systems whose steps take a known time; records the order of turns."""

    def __init__(self, seconds: dict[str, Sequence[float]], losses: dict[str, float] | None = None) -> None:
        self.seconds = {label: iter(times) for label, times in seconds.items()}
        self.losses = losses or {}
        self.turns: list[tuple[str, TurnRequest]] = []

    def run(self, label: str, turn: TurnRequest) -> TurnResult:
        self.turns.append((label, turn))
        values = (self.losses.get(label, 5.0),) * (turn.warmup + turn.steps)
        waited = {"sync": 0.01} if label.startswith("tw:") else {}
        return TurnResult(label, turn, next(self.seconds[label]), 0.4, waited, (1e6, 2e6), (3e6, 1e6), values, 1 << 20)


def session(
    rounds: int, steps: int, report: Callable[[str], object] = lambda line: None, lean: bool = False
) -> Session:
    return Session(2, 2, rounds, steps, 60.0, report, lean)


def run(
    settings: Sequence[Setting], rounds: int, losses: dict[str, float] | None = None
) -> tuple[list[SystemRow], list[Sample], FakeRunner]:
    count = 1 + rounds * len(settings)
    times = {"local": [0.2] * count, "fsdp2": [0.5, *[0.4, 0.6, 0.5] * count], "ddp": [0.7] * count}
    runner = FakeRunner({**times, "tw:zero3": [0.9, *[0.3, 0.3, 0.5] * count]}, losses)
    samples = interleave(runner, lambda rate: None, SYSTEMS, settings, session(rounds, 2))
    return make_rows(samples, SYSTEMS, tokens=512, cores=2), samples, runner


def row(rows: Sequence[SystemRow], system: str) -> SystemRow:
    return next(row for row in rows if row.system == system)


def test_rows_hold_medians_spread_and_bound() -> None:
    rows, _, _ = run([FREE], 3)
    assert [row.system for row in rows] == ["local", "fsdp2", "ddp", "tw:zero3"]
    ours = row(rows, "tw:zero3")
    assert ours.samples == pytest.approx((300, 300, 500))
    assert (ours.step_ms, ours.step_ms_min, ours.step_ms_max) == pytest.approx((300, 300, 500))
    assert ours.exposed_ms == pytest.approx(100)
    assert ours.tokens_per_second == pytest.approx(512 / 0.3)
    assert ours.waited_ms == pytest.approx({"sync": 10})
    assert (ours.internode_bytes, ours.internode_bytes_sum) == (3e6, 3e6)
    assert ours.bound_ms == pytest.approx(200)  # 0.4 processor seconds on two cores
    assert ours.bound_ratio == pytest.approx(1.5)
    assert ours.refused is None
    assert json.loads(json.dumps(asdict(ours)))["kind"] == "plan"


def test_a_slow_link_is_the_bound() -> None:
    rows, _, _ = run([SLOW], 1)
    assert row(rows, "ddp").bound_ms == pytest.approx(3000)  # 3 MB at 1 MB/s


def test_nothing_is_exposed_without_the_bound() -> None:
    _, samples, _ = run([FREE], 1)
    without = [sample for sample in samples if sample.result.label != "local"]
    assert {row.exposed_ms for row in make_rows(without, SYSTEMS[1:], tokens=1, cores=1)} == {None}


def test_ratios_compare_within_rounds() -> None:
    rows, _, _ = run([FREE], 3)
    (best,) = goals(rows)["best plan / best peer"]
    assert (best.plan, best.peer) == ("tw:zero3", "fsdp2")
    assert best.of_medians == pytest.approx(300 / 500)
    assert (best.median, best.smallest, best.largest) == pytest.approx((0.75, 0.5, 1.0))
    assert ratios(rows, {"tw:zero3"}, {"fsdp2"}) == [best]
    assert ratios(rows, {"tw:zero1"}, {"zero1"}) == []


def test_a_system_with_other_losses_is_refused_and_takes_no_part_in_ratios() -> None:
    rows, _, _ = run([FREE, CLIPPED], 2, losses={"fsdp2": 5.2, "local": 9.0})
    assert {row.system for row in rows if row.refused} == {"fsdp2"}
    reason = row(rows, "fsdp2").refused
    assert reason is not None
    assert "4.0% away" in reason
    assert {ratio.peer for ratio in goals(rows)["best plan / best peer"]} == {"ddp"}
    assert goals(rows)["tw:zero3 / fsdp2"] == []


@pytest.mark.parametrize(
    ("other", "refused"), [(5.0, False), (5.09, False), (5.11, True), (4.89, True), (math.nan, True), (math.inf, True)]
)
def test_refusals(other: float, refused: bool) -> None:
    losses = {"local": [1.0] * 4, "a": [5.0] * 4, "b": [5.0] * 4, "c": [other] * 4}
    assert list(refusals(losses, frozenset({"local"}))) == (["c"] if refused else [])


def test_differences_do_not_cancel() -> None:
    assert list(refusals({"a": [5.0] * 2, "b": [5.0] * 2, "c": [4.0, 6.0]})) == ["c"]


def test_all_losses_may_be_bad() -> None:
    assert set(refusals({"a": [math.nan], "b": [math.nan]})) == {"a", "b"}


def test_every_system_takes_the_same_steps_and_the_first_one_rotates() -> None:
    shaped: list[float | None] = []
    labels = [system.label for system in SYSTEMS]
    runner = FakeRunner({label: [1.0] * 99 for label in labels})
    settings = [FREE, CLIPPED, SLOW]
    samples = interleave(runner, shaped.append, SYSTEMS, settings, session(2, 3))
    assert shaped == [None, 8e6, None, 8e6]
    assert [label for label, _ in runner.turns[:4]] == labels
    assert [label for label, _ in runner.turns[4:8]] == labels
    assert [label for label, _ in runner.turns[16:20]] == [*labels[1:], *labels[:1]]
    sequences = {tuple(str(turn) for other, turn in runner.turns if other == label) for label in labels}
    assert len(sequences) == 1
    assert [sample.round for sample in samples].count(None) == 4
    assert {len(values) for values in early_losses(samples).values()} == {20}


def test_memory_is_measured_last_without_what_allocators_keep() -> None:
    shaped: list[float | None] = []
    runner = FakeRunner({system.label: [1.0] * 99 for system in SYSTEMS})
    lines: list[str] = []
    samples = interleave(runner, shaped.append, SYSTEMS, [FREE, SLOW], session(1, 3, lines.append, lean=True))
    assert [line.rpartition(": ")[0].split()[-1] for line in lines] == [sample.result.label for sample in samples]
    assert [line.split()[0] for line in lines] == ["start-up"] * 4 + ["round"] * 8 + ["memory"] * 4
    assert shaped == [None, 8e6, None]
    lean = [turn.lean for _, turn in runner.turns]
    assert lean == [False] * (len(lean) - len(SYSTEMS)) + [True] * len(SYSTEMS)
    assert all(row.needed_rss == 1 << 20 for row in make_rows(samples, SYSTEMS, tokens=512, cores=2))
    assert all(row.needed_rss is None for row in run([FREE], 1)[0])


@pytest.mark.slow
def test_a_lean_process_forgets_its_peak_and_gives_back_what_it_frees() -> None:
    script = """
from thinwire_bench.systems.rank import _Lean, _peak_of_turn
import torch, time
kept = [torch.ones(1 << 16) for _ in range(512)]
del kept[::2]
large = torch.ones(64 << 20)
del large
with _Lean():
    time.sleep(0.2)
    start = _peak_of_turn()
    used = torch.ones(8 << 20)
assert (24 << 20) < _peak_of_turn() - start < (48 << 20), (start, _peak_of_turn())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_system_with_cycles_takes_whole_ones_and_each_begins_with_an_exchange() -> None:
    islands = SystemSpec("tw:islands", "m:f", kind=SystemKind.CHANGED, cycle=8, gap=4)
    runner = FakeRunner({label: [1.0] * 99 for label in ("local", "tw:islands")})
    interleave(runner, lambda rate: None, [SYSTEMS[0], islands], [FREE], session(2, 3))
    turns = [turn for label, turn in runner.turns if label == "tw:islands"]
    assert [(turn.warmup, turn.steps) for turn in turns] == [(10, 1), (0, 8), (0, 8)]
    assert all((11 + 8 * number) % 4 == 3 for number in range(2)), "the next step is a multiple of the gap"
    assert [turn.steps for label, turn in runner.turns if label == "local"] == [1, 3, 3]


def test_tables_and_picture_show_every_row(tmp_path: Path) -> None:
    rows, _, _ = run([FREE, CLIPPED, SLOW, SLOW_CLIPPED], 2, losses={"ddp": 9.0})
    made = tables(rows)
    assert len(made) == 4
    cells = [[str(cell) for cell in column.cells] for column in made[0].columns]
    assert cells[0] == [system.label for system in SYSTEMS]
    assert cells[1][2] == "REFUSED"
    assert goals_table(goals(rows)).row_count == 8
    path = tmp_path / "bench.png"
    draw(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plans_and_peers_of_one_name_differ_in_label(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(plan_systems(["zero3"], {}, nodes=2, ranks=2)[0].options["plan"])
    plans = plan_systems(["zero1", str(path)], {"seq": 8}, nodes=2, ranks=2)
    assert [system.label for system in plans] == ["tw:zero1", "tw:mine"]
    assert {system.kind for system in plans} == {SystemKind.PLAN}
    local, zero1 = peer_systems(["local", "zero1"], {"seq": 8})
    assert (local.kind, local.joined) == (SystemKind.BOUND, False)
    assert (zero1.label, zero1.kind, zero1.joined) == ("zero1", SystemKind.PEER, True)
    with pytest.raises(SpecError, match="is not that of --nodes 2 --ranks 4"):
        plan_systems([str(path)], {}, nodes=2, ranks=4)


def test_a_peer_that_is_not_installed_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"deepspeed3 needs the package deepspeed.*make bench-peers"):
        peer_systems(["ddp", "deepspeed3"], {})
    assert [system.label for system in peer_systems(["ddp"], {})] == ["ddp"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "ddp,horovod"], "there is no peer 'horovod'; valid are local, ddp"),
        (["--plans", "zero7"], "there is no preset 'zero7'"),
        (["--plans", "absent.toml"], "absent.toml"),
        (["--bandwidth", "fast"], "'fast' is not a bandwidth"),
        (["--clip", "-1"], "'-1' is not a bound on the gradient norm"),
        (["--clip", "nan"], "'nan' is not a bound"),
        (["--clip", ","], "--clip each need a value"),
        (["--peers", "ddp,ddp"], "system ddp is named twice"),
        (["--peers", "", "--plans", ""], "nothing to run"),
        (["--model", "gpt"], "there is no model 'gpt'; valid are llama-17m"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "step", *options])
    assert done.exit_code == 1
    assert message in done.stderr


def test_a_refusal_is_written_down_and_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faked(systems: Sequence[SystemSpec], settings: Sequence[Setting], session: Session) -> list[Sample]:
        labels = [system.label for system in systems]
        runner = FakeRunner({label: [1.0] * 99 for label in labels}, losses={"hsdp": 6.0})
        return interleave(runner, lambda rate: None, systems, settings, replace(session, rounds=2))

    monkeypatch.setattr("thinwire_bench.systems.interleave.run", faked)
    out, picture = tmp_path / "step.json", tmp_path / "step.png"
    chosen = ["--bandwidth", "none,1gbit", "--json", str(out), "--png", str(picture)]
    done = CliRunner().invoke(app, ["bench", "step", *chosen])
    assert done.exit_code == 1
    assert "1 of the systems refused, their rows do not count: hsdp: its loss is 20.0% away" in done.stderr
    assert "REFUSED" in done.stdout
    content = json.loads(out.read_text())
    assert {row["system"] for row in content["rows"] if row["refused"]} == {"hsdp"}
    assert [(ratio["plan"], ratio["peer"]) for ratio in content["ratios"]["tw:zero3 / fsdp2"]] == [
        ("tw:zero3", "fsdp2")
    ] * 2
    assert picture.exists()


def test_help_names_every_peer() -> None:
    shown = CliRunner().invoke(app, ["bench", "step", "--help"], env={"COLUMNS": "200"}).stdout
    assert [name for name in PEERS if name not in shown] == []
    assert "Examples" in shown

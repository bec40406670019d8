"""The race before a run: which plans it tries, for how long, which it takes, and that nothing of it is left."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.support.paths import ROOT
from tests.support.small import DATA, records, thinwire, write_text

from thinwire.collectives import group
from thinwire.spec import Plan
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe
from thinwire.testing import run_ranks
from thinwire.train.data.packing import prepare
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.processes.beside import LapsBeside
from thinwire.train.processes.race import Lap, Race, lap_here, race, time_limit

pytestmark = pytest.mark.ranks

RECIPE = f"""
plan = {{ preset = "zero1", compute_dtype = "float32" }}
[model]
layers = 4
hidden = 32
heads = 2
ffn = 48
{DATA}[train]
steps = 30
seq = 32
global_batch = 16
validate_every = 0
validation_samples = 4
[cluster]
nodes = 1
nproc = 2
device = "cpu"
timeout = "60s"
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    plan: Plan
    seconds: float
    label: str | None = None


DDP, ZERO1, ZERO3 = (Plan.preset(name, nodes=1, local=2, micro_batch=8) for name in ("ddp", "zero1", "zero3"))
MANY_MESSAGES = ZERO3.with_(micro_batch=1, micro_batches=8, granularity="module", overlap={"gather": False})
IMPOSSIBLE = DDP.with_(units=({"match": "no_such_module", "keep_gathered": True},))


@pytest.fixture(scope="module")
def directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="thinwire-test-"))
    write_text(path / "text.txt", words=400)
    (path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    prepare(Recipe.read(path / "recipe.toml").data)
    return path


def the_run(directory: Path) -> ResolvedRun:
    return ResolvedRun(Recipe.read(directory / "recipe.toml"), ZERO1, RunDirectory(directory / "never"), node_ranks=2)


class Clock:
    """A clock that only laps move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.parts: list[float] = []

    def __call__(self) -> float:
        return self.now

    def lap(self, steps: dict[Plan, float], *, starting: float = 1.0) -> Callable[[Plan, float, float], Lap]:
        def run(plan: Plan, left: float, part: float) -> Lap:
            self.parts.append(part)
            wanted = starting + 5 * steps[plan]
            self.now += min(wanted, left)
            return Lap((steps[plan],) * 5) if wanted <= left else Lap(problem="too late")

        return run


def test_the_faster_plan_is_taken_even_if_it_was_predicted_slower() -> None:
    clock = Clock()
    entered = [Entry(ZERO1, 0.1), Entry(DDP, 0.2, "ddp"), Entry(ZERO3, 0.3, "zero3")]
    done = race(entered, clock.lap({ZERO1: 0.5, DDP: 0.4, ZERO3: 0.6}), 30.0, clock=clock)
    assert done.taken.plan == DDP
    assert [raced.measured for raced in done.plans] == [0.5, 0.4, 0.6]
    assert done.seconds == pytest.approx(3 + 5 * 1.5)
    assert clock.parts == [pytest.approx(part) for part in (30.0 / 3, 26.5 / 2, 23.5)]
    assert "taken: preset ddp" in done.lines()[-1]


def test_the_time_of_a_race_is_kept() -> None:
    """Plans that would not be through in time do not start, and one that takes longer than predicted is ended."""
    clock = Clock()
    entered = [Entry(ZERO1, 0.1), Entry(DDP, 0.2), Entry(ZERO3, 2.0), Entry(MANY_MESSAGES, 0.1)]
    done = race(entered, clock.lap({ZERO1: 0.4, DDP: 0.4, MANY_MESSAGES: 9.0}), 9.0, clock=clock)
    assert clock.now == 109.0
    assert done.seconds == 9.0
    assert [raced.problem for raced in done.plans] == [None, None, "no time was left for it", "too late"]
    assert done.taken.plan == ZERO1


def test_predictions_that_are_too_slow_keep_no_plan_out() -> None:
    clock = Clock()
    entered = [Entry(ZERO1, 2.0), Entry(DDP, 5.0), Entry(ZERO3, 9.0)]
    done = race(entered, clock.lap({ZERO1: 0.2, DDP: 0.5, ZERO3: 0.1}), 10.0, clock=clock)
    assert [raced.measured for raced in done.plans] == [0.2, 0.5, 0.1]
    assert done.taken.plan == ZERO3


def test_without_a_step_in_time_the_predicted_winner_is_taken() -> None:
    clock = Clock()
    done = race([Entry(ZERO3, 0.1), Entry(DDP, 0.2)], clock.lap({ZERO3: 50.0, DDP: 0.1}), 20.0, clock=clock)
    assert done.taken.plan == ZERO3
    assert "the predicted winner is taken" in done.lines()[-1]


def test_a_race_takes_30_seconds_or_1_percent_and_none_of_a_short_run() -> None:
    assert time_limit(450, 0.2) == 30.0
    assert time_limit(100_000, 0.2) == 200.0
    assert time_limit(100, 0.2) is None


def test_measured_steps_decide_and_a_plan_that_fails_drops_out(directory: Path) -> None:
    """On ranks that this process starts: the winner by prediction is slower, and one plan cannot be trained."""
    entered = [Entry(MANY_MESSAGES, 0.001), Entry(IMPOSSIBLE, 0.002), Entry(DDP, 0.1, "ddp")]
    done = race(entered, lap_here(the_run(directory)), 120.0)
    check_outcome(done)
    assert not (directory / "never").exists()


def test_ranks_that_are_not_through_in_time_are_ended(directory: Path) -> None:
    lap = lap_here(the_run(directory))(DDP, 0.05, 0.05)
    assert lap == Lap(problem="no step was timed in the 50 ms that were left")


def check_outcome(done: Race) -> None:
    slow, failed, fast = done.plans
    assert slow.measured is not None
    assert fast.measured is not None
    assert fast.measured < slow.measured
    assert done.taken is fast
    assert failed.measured is None
    assert failed.problem is not None
    assert failed.problem.startswith("rank ")
    assert "no_such_module" in failed.problem


def racers(name: str) -> list[psutil.Process]:
    """Processes of laps that this process has started, by the name of their rank."""
    return [child for child in psutil.Process().children(recursive=True) if child.name() == name]


def kill(racer: psutil.Process) -> None:
    racer.kill()


def limit_memory(racer: psutil.Process) -> None:
    """Give a racer no memory beyond what it has."""
    racer.rlimit(psutil.RLIMIT_DATA, (1 << 20, 1 << 20))


def strike_first(strike: Callable[[psutil.Process], None], name: str) -> threading.Thread:
    """Strike the first racer that appears, once."""

    def watch() -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            for racer in racers(name):
                strike(racer)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("strike", "said"),
    [
        pytest.param(kill, "was killed by SIGKILL", id="killed"),
        pytest.param(limit_memory, "", id="memory", marks=pytest.mark.slow),
    ],
)
def test_others_go_on_after_a_finalist_that_dies(
    directory: Path, strike: Callable[[psutil.Process], None], said: str
) -> None:
    striking = strike_first(strike, "rank 1")
    entered = [Entry(MANY_MESSAGES, 0.001), Entry(DDP, 0.1, "ddp"), Entry(ZERO1, 0.2, "zero1")]
    done = race(entered, lap_here(the_run(directory)), 120.0)
    striking.join()
    lost, *others = done.plans
    assert lost.failed
    assert said in str(lost.problem)
    assert all(raced.measured is not None for raced in others)
    assert done.taken in others
    assert str(lost.problem) in done.lines()[0]


def test_without_a_timed_step_a_plan_that_did_not_fail_is_taken() -> None:
    laps = {ZERO3: Lap(problem="rank 1: out of memory", failed=True), DDP: Lap(problem="too late")}
    done = race([Entry(ZERO3, 0.1), Entry(DDP, 0.2, "ddp")], lambda plan, _left, _part: laps[plan], 20.0)
    assert done.taken.plan == DDP
    assert "the first that did not fail is taken: preset ddp" in done.lines()[-1]


def race_without_a_helper(directory: str) -> Race:
    """The first helper of the second rank is killed in the first lap."""
    os.environ["OMP_NUM_THREADS"] = "1"
    entered = [Entry(MANY_MESSAGES, 0.001), Entry(DDP, 0.1, "ddp"), Entry(ZERO1, 0.2, "zero1")]
    with LapsBeside(the_run(Path(directory)), group.control()) as laps:
        striking = strike_first(lambda racer: laps._helper.kill(), "rank 1") if group.control().rank else None
        done = race(entered, laps.lap, 160.0, clock=laps.clock, prepare=laps.prepare)
        if striking is not None:
            striking.join()
        return done


@pytest.mark.slow
def test_others_go_on_after_the_loss_of_a_helper(directory: Path) -> None:
    first, second = run_ranks(2, race_without_a_helper, str(directory), timeout=220.0)
    assert first == second
    lost, *others = first.plans
    assert "has ended" in str(lost.problem)
    assert all(raced.measured is not None for raced in others)
    assert first.seconds < 60, "nobody waits for the lost rank until the time is over"


def race_beside(directory: str) -> Race:
    os.environ["OMP_NUM_THREADS"] = "1"
    entered = [Entry(MANY_MESSAGES, 0.001), Entry(IMPOSSIBLE, 0.002), Entry(DDP, 0.1, "ddp")]
    with LapsBeside(the_run(Path(directory)), group.control()) as laps:
        return race(entered, laps.lap, 120.0, clock=laps.clock, prepare=laps.prepare)


@pytest.mark.slow
def test_ranks_of_a_launcher_agree(directory: Path) -> None:
    first, second = run_ranks(2, race_beside, str(directory), timeout=200.0)
    assert first == second
    check_outcome(first)


@pytest.mark.slow
def test_a_run_after_a_race_is_the_run_of_its_plan(directory: Path) -> None:
    """Bit for bit: losses and norms of every step."""
    # On a machine that is predicted to be slow, the run is long enough for a race.
    profile = Profile.read(ROOT / "docs" / "results" / "planner" / "profile-200mbit.json").paced(200.0)
    profile.write(directory / "slow.json")
    output = train(directory, "raced", "--plan", "auto", "--profile", str(directory / "slow.json"))
    assert "auto: the race took" in output
    recorded = json.loads((directory / "raced" / "race.json").read_text(encoding="utf-8"))
    timed = {raced["measured"]: raced for raced in recorded["plans"] if raced["measured"] is not None}
    (taken,) = (raced for raced in recorded["plans"] if raced["taken"])
    assert taken == timed[min(timed)]
    noted = Profile.read(directory / "raced" / "profile.json").steps
    assert {row.seconds for row in noted} == set(timed)
    plan = Plan.load(directory / "raced" / "plan.toml")
    assert plan == Plan.parse(taken["plan"])
    plan.save(directory / "taken.toml", full=True)
    train(directory, "named", "--plan", str(directory / "taken.toml"))
    assert steps_of(directory / "raced") == steps_of(directory / "named")


def train(directory: Path, name: str, *arguments: str) -> str:
    settings = ("--set", "cluster.nodes=2", "--set", "train.tensorboard=false")
    return thinwire("train", str(directory / "recipe.toml"), "--out", str(directory / name), *settings, *arguments)


def steps_of(run: Path) -> list[tuple[float, ...]]:
    rows = records(run)
    assert all(row["step"] == before["step"] + 1 for before, row in itertools.pairwise(rows))
    return [(row["step"], row["loss"], row["grad_norm"], row["val_loss"]) for row in rows]

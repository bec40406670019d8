"""One run, disturbed again and again, and compared with the same run undisturbed."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.errors import UsageError
from thinwire_bench.chaos.disk import Disk
from thinwire_bench.chaos.incidents import CABLED, INCIDENTS, Scene
from thinwire_bench.chaos.run import DisturbedRun, environment, losses, train_command
from thinwire_bench.chaos.setups import STEPS, SmallRun

_LAST: Final = STEPS - 8
"""The last step at which something happens: the run must not end by itself before."""

_CABLED_TIMEOUT: Final = 0.6
"""Share of the timeout that holds in a lab, where each cut is waited for twice."""


@dataclass(frozen=True)
class CampaignSettings:
    """What holds for all trials of a campaign: its directory, seconds until a collective gives up, seconds that a start
    may take, and whether runs get a file system of their own."""

    work: Path
    timeout: float
    patience: float
    mounts: bool

    @property
    def corpus(self) -> Path:
        """Training data of all runs."""
        return self.work / "corpus"


@dataclass(frozen=True)
class Trial:
    """A run and what happens to it.

    Attributes:
        setup: The run.
        kinds: Incidents in order, by name.
        seed: Of everything that is drawn.
        cabled: Whether it runs in a lab, under no launcher.
        turn: How often the campaign has gone through all trials before.
    """

    setup: SmallRun
    kinds: tuple[str, ...]
    seed: int
    cabled: bool = False
    turn: int = 0

    @property
    def name(self) -> str:
        """Unique within a campaign."""
        return f"{self.setup.name}{'-cabled' if self.cabled else ''}{f'-{self.turn + 1}' if self.turn else ''}"

    def timeout(self, settings: CampaignSettings) -> float:
        """Seconds until a collective gives up."""
        return settings.timeout * (_CABLED_TIMEOUT if self.cabled else 1)


@dataclass
class Incident:
    """What happened once.

    Attributes:
        kind: Its name.
        step: The run's step when it happened; ``None`` if the run was over before.
        detail: What was done.
        seconds: How long it took until the run trained again or had ended.
        faults: Kind (``hang``, ``end``, ``traceback`` or ``lost``) and description of what should not have happened.
    """

    kind: str
    step: int | None
    detail: str = ""
    seconds: float = 0.0
    faults: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class TrialVerdict:
    """The outcome of a trial.

    Attributes:
        trial: Its name.
        run: Name of the run.
        group: ``preset``, ``codec`` or ``schedule``.
        source: Where the run's tokens came from.
        incidents: In order.
        equal: Whether losses, gradient norms, validation losses and the last checkpoint are those of the undisturbed
            run, to the last digit.
        about: The first difference, or why there is none to compare.
        seconds: Duration of the trial.
    """

    trial: str
    run: str
    group: str
    source: str
    incidents: list[Incident]
    equal: bool
    about: str
    seconds: float


def conduct(trial: Trial, settings: CampaignSettings, report: Callable[[str], None]) -> TrialVerdict:
    """Disturb a run, and compare it; the directory of the trial is deleted if nothing is wrong.

    Raises:
        UsageError: The undisturbed run fails.
    """
    began = time.monotonic()
    whole = _undisturbed(trial.setup, settings)
    place = settings.work / trial.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    chance = random.Random(trial.seed)
    with Disk(place / "disk", mounts=settings.mounts and not trial.cabled) as disk:
        run = _run(trial, settings, place, disk.path / "run")
        scene = Scene(run, disk, chance, trial.timeout(settings), settings.patience)
        try:
            incidents = [
                _strike(scene, kind, at, report) for kind, at in zip(trial.kinds, _moments(trial, chance), strict=True)
            ]
            about = _finish(scene, incidents) or _difference(whole, run.directory)
        finally:
            if run.running:
                run.kill_all()
    setup, seconds = trial.setup, time.monotonic() - began
    verdict = TrialVerdict(trial.name, setup.name, setup.group, setup.source, incidents, not about, about, seconds)
    if verdict.equal and not any(incident.faults for incident in incidents):
        shutil.rmtree(place, ignore_errors=True)
    return verdict


def _run(trial: Trial, settings: CampaignSettings, place: Path, directory: Path) -> DisturbedRun:
    setup, recipe = trial.setup, place / "recipe.toml"
    recipe.write_text(setup.recipe(settings.corpus, timeout=trial.timeout(settings)), encoding="utf-8")
    command = train_command(recipe, setup.nodes, setup.local)
    if trial.cabled:
        hosts = [str(setup.nodes), str(setup.local), str(place / "ranks")]
        ranks = [sys.executable, "-m", "thinwire.cli.main", "train", str(recipe)]
        command = [sys.executable, "-m", "thinwire_bench.chaos.cabled", *hosts, *ranks]
    return DisturbedRun(command, directory, place / "run.log", environment(settings.work / "cache"))


def _undisturbed(setup: SmallRun, settings: CampaignSettings) -> Path:
    """The directory of the run that nothing disturbs; trained once in a campaign."""
    place = settings.work / "undisturbed" / setup.name
    if not (place / "run" / "summary.json").is_file():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        run = _run(Trial(setup, (), 0), settings, place, place / "run")
        run.start()
        try:
            ended = run.ended(20 * settings.patience)
        finally:
            if run.running:
                run.kill_all()
        if ended.status != 0:
            raise UsageError(f"{setup.name} fails without any incident: {ended.sentence}; see {run.log}")
    return place / "run"


def _moments(trial: Trial, chance: random.Random) -> list[int]:
    """At which step each incident happens, in order."""
    size = _LAST / max(1, len(trial.kinds))
    return [int(size * number + chance.uniform(0.1, 0.9) * size) for number in range(len(trial.kinds))]


def _strike(scene: Scene, kind: str, at: int, report: Callable[[str], None]) -> Incident:
    """Let the run train up to a step, and disturb it."""
    run = scene.run
    incident = Incident(kind, None)
    scene.faults, scene.detail = incident.faults, ""
    _go_on(scene, at)
    if not run.running:
        run.kill_all()
        if not incident.faults:
            scene.faults.append(("end", f"the run ended before step {at}: {run.ended(1).sentence}"))
        return incident
    incident.step = run.step
    scene.note_complete()
    # A checkpoint that has just appeared is not yet on the device: the rename is synced after the name shows.
    if kind not in CABLED and "power" in kind:
        time.sleep(0.5)
    began = time.monotonic()
    INCIDENTS[kind](scene)
    incident.seconds, incident.detail = time.monotonic() - began, scene.detail
    scene.check_nothing_lost()
    wrong = "".join(f"\n  {kind.upper()}: {text}" for kind, text in incident.faults)
    report(f"step {incident.step}: {kind} ({scene.detail or 'as it is'}), {incident.seconds:.1f} s {wrong}")
    return incident


def _go_on(scene: Scene, at: int) -> None:
    """Let the run reach a step; it is started if it does not run."""
    run = scene.run
    if not run.running:
        starts = run.starts
        run.start()
        if not scene.trains_again(starts, "started again") and not scene.faults:
            scene.ended({0}, "started again")
            return
    scene.check_nothing_lost()
    if not run.wait_for(lambda: run.step >= at, 20 * scene.patience) and run.running:
        scene.faults.append(("hang", f"step {at} is not reached"))
        run.kill_all()


def _finish(scene: Scene, incidents: Sequence[Incident]) -> str:
    """Let the run complete; returns why it does not."""
    last = scene.faults = incidents[-1].faults if incidents else []
    before = len(last)
    if not scene.run.running:
        scene.run.start()
    ended = scene.run.ended(20 * scene.patience)
    scene.look_for_tracebacks(scene.run.log.read_text(errors="replace"))
    with contextlib.suppress(OSError):
        for log in [*(scene.run.directory / "logs").glob("*.log"), *scene.run.log.with_name("ranks").glob("*.log")]:
            scene.look_for_tracebacks(log.read_text(errors="replace"))
    scene.check_nothing_lost()
    if ended.status != 0:
        scene.faults.append(("hang" if ended.status is None else "end", f"the run does not complete: {ended.sentence}"))
    return "; ".join(text for _, text in last[before:])


def _difference(whole: Path, disturbed: Path) -> str:
    """The first difference of two runs; empty if there is none."""
    wanted, found = losses(whole / "metrics.jsonl"), losses(disturbed / "metrics.jsonl")
    for step in range(1, STEPS + 1):
        if wanted.get(step) != found.get(step):
            return f"step {step}: {found.get(step)} instead of {wanted.get(step)}"
    name = Path("checkpoints", f"step-{STEPS:08d}", MANIFEST_NAME)
    if (whole / name).read_bytes() != (disturbed / name).read_bytes():
        return "the last checkpoint is another"
    return ""

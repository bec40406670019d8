"""What happens to a run on purpose, and what must then be true of it.

An incident takes a run that trains, and returns once the run trains again or has ended. What must not have happened is
noted: an end without a sentence, a traceback, a wait beyond the timeout. Whether something was lost shows later.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from thinwire_bench.chaos import damage
from thinwire_bench.chaos.disk import Disk
from thinwire_bench.chaos.run import CommandEnd, DisturbedRun, send
from thinwire_bench.chaos.setups import SAVE_EVERY

_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\)|\(traceback: ")

_NO_ROOM: Final = re.compile(r"No space left on device|free bytes")


@dataclass
class Scene:
    """A run, its disk, and what went wrong that should not have.

    Attributes:
        run: The run.
        disk: Where it writes.
        chance: Decides everything.
        timeout: Seconds until a collective of the run gives up.
        patience: Seconds that a start may take on a busy machine.
        faults: Kind and description of what should not have happened.
        detail: What exactly was done.
        floor: Step of a checkpoint that was complete before the incident, and must be there afterwards.
        judged: Number of starts that have been compared with it.
    """

    run: DisturbedRun
    disk: Disk
    chance: random.Random
    timeout: float
    patience: float
    faults: list[tuple[str, str]] = field(default_factory=list)
    detail: str = ""
    floor: int = 0
    judged: int = 0

    @property
    def longest(self) -> float:
        """Seconds after which a run that neither trains nor ends has hung: two timeouts, an end and a start."""
        return 2 * self.timeout + self.patience

    def note_complete(self) -> None:
        """Take note of the newest checkpoint: it is there to stay. Starts of before need not have known it."""
        self.check_nothing_lost()
        known = self.run.checkpoints()
        self.floor = max([self.floor, *(int(path.name.removeprefix("step-")) for path in known[-1:])])

    def check_nothing_lost(self) -> None:
        """Note starts that went on from before a checkpoint that was complete by then."""
        for number in range(self.judged, self.run.starts):
            step = step_of_start(self.run, number)
            if step is not None and step < self.floor:
                self.faults.append(("lost", f"step {self.floor} was saved, and the run goes on from step {step}"))
        self.judged = self.run.starts

    def ended(self, statuses: set[int], about: str) -> CommandEnd:
        """Wait for the end of the command, which must be in one sentence and with one of the statuses."""
        ended = self.run.ended(self.longest)
        if ended.status is None:
            self.faults.append(("hang", f"{about}: no end within {self.longest:.0f} s"))
        elif ended.status not in statuses:
            self.faults.append(("end", f"{about}: status {ended.status}: {ended.sentence}"))
        self.look_for_tracebacks(ended.text)
        return ended

    def look_for_tracebacks(self, text: str) -> None:
        """Note a traceback where a user would see it."""
        if (found := _TRACEBACK.search(text)) is not None:
            self.faults.append(("traceback", text[max(0, found.start() - 200) : found.end() + 1500]))

    def trains_again(self, starts: int, about: str) -> bool:
        """Wait until ranks have begun once more, or the command has ended."""
        if self.run.wait_for(lambda: self.run.starts > starts, self.longest):
            return True
        if self.run.running:
            self.faults.append(("hang", f"{about}: no ranks again within {self.longest:.0f} s"))
            self.run.kill_all()
        return False

    def restarts(self, starts: int, about: str) -> None:
        """The launcher must start all ranks again by itself."""
        if not self.trains_again(starts, about) and not self.run.running:
            self.ended({0}, about)

    def steps_again(self, about: str) -> None:
        """Wait until the run has taken one more step, or has ended."""
        step = self.run.step
        if not self.run.wait_for(lambda: self.run.step > step, self.longest) and self.run.running:
            self.faults.append(("hang", f"no step after {about}"))
            self.run.kill_all()

    def begin_again(self, longest: float) -> None:
        """Kill the run, start it, and let so many seconds pass at most."""
        self.run.kill_all()
        self.run.start()
        delay = self.chance.uniform(0, longest)
        self.detail = f"{delay:.2f} s after the start"
        time.sleep(delay)

    def fill_disk(self, *most: int) -> None:
        """Fill the disk wholly, or up to fewer free bytes than one of these."""
        leave = self.chance.choice([0, *map(self.chance.randrange, most)])
        self.detail = f"{leave:,} bytes free"
        self.disk.fill(leave)

    def some_ranks(self, number: int) -> list[int]:
        """Processes of a few ranks, drawn."""
        ranks = self.run.ranks()
        return self.chance.sample(ranks, min(number, len(ranks)))


def _kill_ranks(number: int) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        starts, doomed = scene.run.starts, scene.some_ranks(number)
        scene.detail = f"{len(doomed)} of {len(scene.run.ranks())} ranks"
        send(doomed, signal.SIGKILL)
        scene.restarts(starts, "after a killed rank")

    return strike


def _kill_launcher(scene: Scene) -> None:
    everyone = list(scene.run.processes())
    send([scene.run.pid], signal.SIGKILL)
    if not scene.run.cleared(everyone):
        scene.faults.append(("hang", "processes outlive their launcher"))


def _kill_in_save(scene: Scene) -> None:
    checkpoints = scene.run.directory / "checkpoints"
    if not scene.run.wait_for(lambda: any(checkpoints.glob(".tmp-*")), scene.longest):
        scene.faults.append(("hang", f"no save within {scene.longest:.0f} s"))
        return
    time.sleep(scene.chance.uniform(0, 0.05))
    scene.run.kill_all()


def _kill_at_start(scene: Scene) -> None:
    scene.begin_again(6)
    scene.run.kill_all()


def _pause(scene: Scene, processes: list[int]) -> None:
    seconds = scene.chance.uniform(0.1, 2)
    scene.detail = f"{seconds:.2f} s"
    send(processes, signal.SIGSTOP)
    time.sleep(seconds)
    send(processes, signal.SIGCONT)
    scene.steps_again("a pause")


def _hang(scene: Scene) -> None:
    starts = scene.run.starts
    send(scene.some_ranks(1), signal.SIGSTOP)
    scene.restarts(starts, "after a rank that never answers")


def _hang_up(scene: Scene) -> None:
    everyone = list(scene.run.processes())
    send([scene.run.pid], signal.SIGHUP)
    scene.ended({0, 1}, "after SIGHUP")
    if not scene.run.cleared(everyone):
        scene.faults.append(("hang", "processes outlive a hang-up"))


def _interrupt(scene: Scene) -> None:
    number = scene.chance.choice([signal.SIGINT, signal.SIGTERM])
    scene.detail = number.name
    send([scene.run.pid], number)
    scene.ended({0}, f"after {number.name}")
    scene.note_complete()


def _full_disk(scene: Scene) -> None:
    scene.fill_disk(40_000, 1_500_000)
    later = scene.run.step + 3 * SAVE_EVERY
    scene.run.wait_for(lambda: scene.run.step >= later, scene.longest)
    if not scene.run.running:
        _check_room(scene, {0, 1}, "on a full disk")
    scene.disk.free()


def _full_at_start(scene: Scene) -> None:
    scene.run.kill_all()
    scene.fill_disk(20_000, 1_200_000)
    starts = scene.run.starts
    scene.run.start()
    if not scene.trains_again(starts, "on a full disk") and not scene.run.running:
        _check_room(scene, {1}, "started on a full disk")
    scene.disk.free()


def _check_room(scene: Scene, statuses: set[int], about: str) -> None:
    """A command that fails must say that there is no room."""
    ended = scene.ended(statuses, about)
    if ended.status == 1 and not _NO_ROOM.search(ended.sentence):
        scene.faults.append(("end", f"{about}: {ended.sentence}"))


def _power_loss_at_start(scene: Scene) -> None:
    scene.begin_again(8)
    _cut_power(scene)


def _cut_power(scene: Scene) -> None:
    """Everything stops in the middle of what it does, and what had not reached the device is gone."""
    send(list(scene.run.processes()), signal.SIGSTOP)
    scene.disk.photograph()
    scene.run.kill_all()
    scene.disk.lose_power()


def _damage(how: Callable[[Path, random.Random], str]) -> Callable[[Scene], None]:
    """The newest checkpoint is damaged: the run must refuse it in a sentence. It is then restored, or moved away."""

    def strike(scene: Scene) -> None:
        scene.run.wait_for(lambda: bool(scene.run.checkpoints()), scene.longest)
        scene.run.kill_all()
        if not (known := scene.run.checkpoints()):
            scene.faults.append(("hang", f"no checkpoint within {scene.longest:.0f} s"))
            return
        newest, kept = known[-1], scene.run.log.with_name("kept")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(newest, kept)
        scene.detail = how(newest, scene.chance)
        starts = scene.run.starts
        scene.run.start()
        if scene.trains_again(starts, "a damaged checkpoint") or scene.run.running:
            scene.detail += ", accepted"  # a number that is wrong and well typed, under a right checksum
            scene.run.kill_all()
        else:
            scene.ended({1}, "a damaged checkpoint")
        for other in scene.run.checkpoints():
            if other.name >= newest.name:  # what was trained from damage goes with it
                shutil.rmtree(other)
        if len(known) == 1 or how is damage.reseal or scene.chance.random() < 0.5:
            shutil.copytree(kept, newest)
        else:
            scene.floor = 0

    return strike


def _flap(scene: Scene) -> None:
    host, seconds = scene.chance.randrange(2), scene.chance.uniform(0.1, 3)
    scene.detail = f"host {host} for {seconds:.2f} s"
    scene.run.tell(f"{host} down")
    time.sleep(seconds)
    scene.run.tell(f"{host} up")
    scene.steps_again("a short cut")


def _cut(scene: Scene) -> None:
    host = scene.chance.randrange(2)
    scene.detail = f"host {host}"
    scene.run.tell(f"{host} down")
    scene.ended({1}, "after a cut")


INCIDENTS: Final[Mapping[str, Callable[[Scene], None]]] = {
    "a rank is killed": _kill_ranks(1),
    "two ranks are killed": _kill_ranks(2),
    "the launcher is killed": _kill_launcher,
    "all processes are killed": lambda scene: scene.run.kill_all(),
    "killed in a save": _kill_in_save,
    "killed at the start": _kill_at_start,
    "a rank is paused": lambda scene: _pause(scene, scene.some_ranks(1)),
    "all are paused": lambda scene: _pause(scene, list(scene.run.processes())),
    "a rank hangs": _hang,
    "the terminal hangs up": _hang_up,
    "Ctrl-C or SIGTERM": _interrupt,
    "the disk fills up": _full_disk,
    "the disk is full at the start": _full_at_start,
    "power is lost": _cut_power,
    "power is lost at the start": _power_loss_at_start,
    "a bit of a checkpoint flips": _damage(damage.flip),
    "a checkpoint is cut short": _damage(damage.cut_short),
    "a manifest is forged": _damage(damage.reseal),
    "a link is cut for seconds": _flap,
    "a link is cut for good": _cut,
}
"""Every kind of incident by name."""

MOUNTED: Final = (
    "the disk fills up", "the disk is full at the start", "power is lost", "power is lost at the start",
)  # fmt: skip
"""Those that need a file system of the run's own."""

CABLED: Final = ("a link is cut for seconds", "a link is cut for good")
"""Those that need a lab."""


def step_of_start(run: DisturbedRun, number: int) -> int | None:
    """The step from which a start of a run went on; ``None`` if there was no such start."""
    try:
        return int(json.loads((run.directory / "starts.jsonl").read_bytes().splitlines()[number])["step"])
    except (OSError, ValueError, IndexError, KeyError):
        return None

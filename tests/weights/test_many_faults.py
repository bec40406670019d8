"""Trainers and receivers that are killed, and stores that are full, slow and damaged: nothing wrong is ever applied."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from safetensors.torch import load
from tests.support.training.publishing import Trainer, digest

import thinwire as tw
from thinwire.errors import WireError
from thinwire.weights.parts import Name

pytestmark = pytest.mark.ranks

VERSIONS: Final = 500
FAULTS: Final = ("killed", "full", "slow", "receiver", "flipped", "unordered", "two")


class Scene:
    """A store, its trainer, a receiver in this process, and one in another process that keeps a file."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.store, self.model = directory / "store", directory / "model"
        self.rng = random.Random(seed)
        self.history: dict[tuple[str, int], str] = {}
        self.trainer = Trainer(self.store, self.history)
        self.subscriber = tw.Subscriber(str(self.store))
        self.checked: Counter[str] = Counter()
        self.follow()

    def follow(self) -> None:
        """Start the other receiver."""
        command = [sys.executable, "-m", "thinwire.cli.main", "follow", str(self.store), "--out", str(self.model)]
        self.follower = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        """End all processes."""
        self.trainer.kill()
        self.follower.kill()
        self.follower.wait()

    # -- what receivers hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Let the receiver here take what there is, and compare what both hold with what was trained."""
        with contextlib.suppress(WireError):
            self.subscriber.update()
        if self.subscriber.version is not None:
            held = self.subscriber.run, self.subscriber.version
            assert digest(self.subscriber.state_dict().items()) == self.history[held]
            self.checked["in memory"] += 1
        if (kept := self.kept()) is not None:
            assert kept[1] == self.history[kept[0]]
            self.checked["on disk"] += 1

    def kept(self) -> tuple[tuple[str, int], str] | None:
        """Run and version of the file, and the checksum of what it holds."""
        try:  # in one read: safe_open opens a file twice, of which the second may be the next version's
            content = (self.model / "model.safetensors").read_bytes()
        except FileNotFoundError:
            return None
        said = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        return (said["thinwire.run"], int(said["thinwire.version"])), digest(load(content).items())

    def caught_up(self) -> None:
        """Two versions without a fault: both receivers hold the newest, or the other one soon does."""
        for _ in range(2):
            self.trainer.step()
            self.check()
        names = [name for path in self.store.iterdir() if (name := Name.read(path.name)) is not None]
        assert {name.run for name in names} == {self.trainer.run}  # those before it are removed
        newest = self.trainer.run, self.trainer.version
        assert (self.subscriber.run, self.subscriber.version) == newest
        deadline = time.monotonic() + 30
        while (kept := self.kept()) is None or kept[0] != newest:
            assert time.monotonic() < deadline, (kept, newest)
            time.sleep(0.05)
        self.check()

    def newest(self) -> list[Path]:
        """Files of the last version."""
        own = ((path, Name.read(path.name)) for path in self.store.iterdir())
        wanted = self.trainer.run, self.trainer.version
        return [path for path, name in own if name is not None and (name.run, name.version) == wanted]

    # -- faults ------------------------------------------------------------------------------------------------

    def killed(self) -> None:
        """The trainer is killed while it publishes, and started again."""
        self.trainer.step(killed_after=self.rng.uniform(0.0, 0.02))
        self.check()
        self.trainer = Trainer(self.store, self.history)

    def full(self) -> None:
        """The store has no room for a rank's part."""
        self.trainer.step(store="full")

    def slow(self) -> None:
        """The store takes longer than steps."""
        for _ in range(3):
            self.trainer.step(store="slow", waits=False)
            self.check()

    def receiver(self) -> None:
        """The receiver with a file is killed, at any moment, and started again."""
        self.trainer.step(waits=False)
        time.sleep(self.rng.uniform(0.0, 0.3))
        self.follower.kill()
        self.follower.wait()
        self.check()
        self.follow()

    def flipped(self) -> None:
        """A bit of a part changes before it is read."""
        self.trainer.step()
        path = self.rng.choice(self.newest())
        content = bytearray(path.read_bytes())
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(content)

    def unordered(self) -> None:
        """A version appears after the one that follows it."""
        self.trainer.step()
        late = [(path, path.with_suffix(".late")) for path in self.newest()]
        for path, aside in late:
            path.rename(aside)
        self.check()
        self.trainer.step()
        self.check()
        for path, aside in late:
            aside.rename(path)

    def two(self) -> None:
        """A second trainer publishes to the same store, while the first one goes on."""
        first, self.trainer = self.trainer, Trainer(self.store, self.history)
        for _ in range(3):
            self.trainer.step()
            first.step()
            self.check()
        assert first.ended
        first.kill()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, seed=0)
    with contextlib.closing(scene):
        yield scene


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_nothing_wrong_is_ever_applied(scene: Scene) -> None:
    made: Counter[str] = Counter()
    scene.caught_up()
    for fault in itertools.cycle(FAULTS):
        if len(scene.history) >= VERSIONS:
            break
        getattr(scene, fault)()
        made[fault] += 1
        scene.check()
        scene.caught_up()
        for _ in range(min(scene.rng.randrange(12), VERSIONS - len(scene.history))):
            scene.trainer.step()
            scene.check()
    assert made.keys() == set(FAULTS)
    print(f"{len(scene.history)} versions, faults {dict(made)}, compared {dict(scene.checked)}")

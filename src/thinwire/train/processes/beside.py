"""Laps of a race beside ranks that a launcher has started: each rank has a helper, which starts its rank of every lap.

The ranks themselves may hold a model and threads, and their main module may be a script that must not run again. A
helper is a program of its own: it reads one line of JSON for each lap from its standard input, and answers
with one on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import Control
from thinwire.spec import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import free_port
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.processes.race import Answer, Lap, concluded, run_lap
from thinwire.train.processes.ranks import Failure
from thinwire.train.processes.server import called

_ENDING: Final = 30.0
"""Seconds after the end of a lap's time in which its processes have to be gone."""

_ROUND: Final = 0.25
"""Seconds after which ranks tell each other whether their helpers have answered."""

_LAST_WORDS: Final = 2.0
"""Seconds in which others may still answer after a rank has failed: their reasons may be better ones."""

_SILENT: Final = "the process that tries plans for it has ended, or says nothing"

_READY: Final = "\n"
"""What a helper says before its first answer."""


class LapsBeside:
    """Laps of ranks that others have started, with the model, tokens and batches of a run. Every rank makes one, and
    all make the same calls."""

    def __init__(self, run: ResolvedRun, ranks: Control) -> None:
        self._run, self._ranks = run, ranks
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # laps take place on the same device
        self._address = os.environ.get("MASTER_ADDR", "localhost")
        # Some launchers, such as Lightning's, set no RANK.
        local = os.environ.get("LOCAL_RANK", str(ranks.rank % run.node_ranks))
        self._own = {
            "RANK": str(ranks.rank),
            "WORLD_SIZE": str(ranks.size),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": str(run.node_ranks),
        }
        self._helper = _helper()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the helper, which ends when its input does."""
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._helper.wait(_ENDING)
        self._kill()

    def _kill(self) -> None:
        """End the helper, if it has not ended, and let go of what connected this process with it."""
        self._helper.kill()
        self._helper.wait()
        for stream in (self._helper.stdin, self._helper.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was not sent
                stream.close()

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the first rank, which all ranks read together."""
        return lambda: self._ranks.all_gather_typed(time.monotonic(), Typed[float](float))[0]

    def prepare(self) -> None:
        """Wait until the helper has imported what ranks need."""
        self._line(_ENDING)

    def lap(self, plan: Plan, left: float, part: float) -> Lap:
        """Try a plan, which is given up after ``left`` seconds and should take ``part`` of them once enough is
        measured."""
        port = self._ranks.all_gather_typed(free_port(), Typed[int](int))[0]
        meeting = {"MASTER_ADDR": self._address, "MASTER_PORT": str(port)}
        given = {"left": left, "part": part, "only": {**self._own, **meeting}}
        self._say({"run": _written(self._run.with_plan(plan)), **given})
        return concluded(self._ranks.all_gather_typed(self._awaited(left + _ENDING), _ANSWER), left)

    def _awaited(self, patience: float) -> Answer:
        """The helper's answer. Once a rank has failed, the others need not answer: they may wait for it in vain."""
        deadline, last = time.monotonic() + patience, math.inf
        answer: Answer | None = None
        while True:
            answer = answer or self._heard(_ROUND)
            mine = answer is not None, answer is not None and answer[1] is not None, time.monotonic() > deadline
            states = self._ranks.all_gather_typed(mine, _STATES)
            if any(failed for _, failed, _ in states):
                last = min(last, _LAST_WORDS) - _ROUND
            if all(answered for answered, _, _ in states) or last <= 0 or any(late for _, _, late in states):
                break
        if answer is not None:
            return answer
        self._replace()
        return [], Failure(self._ranks.rank, _SILENT) if last > 0 else None

    def _say(self, message: Mapping[str, Any]) -> None:
        """Ask the helper."""
        stdin = self._helper.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # a helper that has ended answers nothing
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()

    def _heard(self, patience: float) -> Answer | None:
        """What the helper answers within so many seconds, if anything. Another one takes the place of one that has
        ended."""
        line = self._line(patience)
        if line is None or line == _READY:  # it has taken longer than expected to get ready
            return None
        if not line:
            self._replace()
            return [], Failure(self._ranks.rank, _SILENT)
        return _ANSWER.decode(line.encode())

    def _line(self, patience: float) -> str | None:
        """The next line that the helper says; empty if it has ended, ``None`` if it says nothing for so long."""
        stdout = self._helper.stdout
        assert stdout is not None
        return stdout.readline() if select.select([stdout], [], [], patience)[0] else None

    def _replace(self) -> None:
        """End the helper and what it has started, and start another one."""
        self._kill()
        self._helper = _helper()


_STATES: Final[Typed[tuple[bool, bool, bool]]] = Typed(tuple[bool, bool, bool])
"""Whether a rank's helper has answered, whether it has failed, and whether its time is over."""

_ANSWER: Final[Typed[Answer]] = Typed(Answer)


def _helper() -> subprocess.Popen[str]:
    """Start a helper."""
    # torchrun's store belongs to its ranks: a lap has one of its own.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside
    )


def _written(run: ResolvedRun) -> dict[str, Any]:
    return {"recipe": run.recipe.to_dict(), "plan": run.plan.to_dict(), "node_ranks": run.node_ranks}


def _read(table: Mapping[str, Any]) -> ResolvedRun:
    nowhere = RunDirectory(Path(tempfile.gettempdir()) / "thinwire-race")
    recipe, plan = Recipe.parse(table["recipe"]), Plan.parse(table["plan"])
    return ResolvedRun(recipe, plan, nowhere, int(table["node_ranks"]))


def _serve() -> None:
    """Be a helper until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    called(os.getpid)
    answers.write(_READY)
    answers.flush()
    for line in sys.stdin:
        message = json.loads(line)
        answer = run_lap(_read(message["run"]), message["left"], message["part"], message["only"])
        answers.write(_ANSWER.encode(answer).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()

"""Laps of a race beside ranks that a launcher has started: each rank has a helper, which starts its rank of every lap.

The ranks themselves may hold a model and threads, and their main module may be a script that must not run again. A
helper is a program of its own: it reads one line of JSON for each lap from its standard input, and answers
with one on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

from thinwire.agreement import Typed
from thinwire.collectives.group import Control
from thinwire.spec import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.processes.race import Lap, concluded, run_lap
from thinwire.train.processes.ranks import Failure, free_port
from thinwire.train.processes.server import called

_ENDING: Final = 30.0
"""Seconds after the end of a lap's time in which its processes have to be gone."""

_READY: Final = "\n"
"""What a helper says before its first answer."""

_PLACE: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class _Answer:
    """What one rank's helper says of a lap."""

    seconds: tuple[float, ...]
    failure: Failure | None


class LapsBeside:
    """Laps of ranks that others have started. Every rank makes one, and all make the same calls.

    Args:
        run: The run, whose model, tokens and batches the laps take.
        ranks: All ranks.
    """

    def __init__(self, run: ResolvedRun, ranks: Control) -> None:
        self._run, self._ranks = run, ranks
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # laps take place on the same device
        self._address = os.environ.get("MASTER_ADDR", "localhost")
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        own = {name: os.environ[name] for name in _PLACE if name in os.environ}
        self._own = own if "RANK" in own else alone
        # torchrun's store belongs to its ranks: a lap has one of its own.
        outside = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        self._helper = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the helper, which ends when its input does."""
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.close()
        self._helper.stdout.close()
        try:
            self._helper.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._helper.kill()

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the first rank, which all ranks read together."""
        return lambda: self._ranks.all_gather_typed(time.monotonic(), Typed[float](float))[0]

    def prepare(self) -> None:
        """Wait until the helper has imported what ranks need."""
        self._answer(_ENDING)

    def lap(self, plan: Plan, left: float, part: float) -> Lap:
        """Try a plan.

        Args:
            plan: The plan.
            left: Seconds after which it is given up.
            part: Seconds that it should take, once enough is measured.
        """
        port = self._ranks.all_gather_typed(free_port(), Typed[int](int))[0]
        meeting = {"MASTER_ADDR": self._address, "MASTER_PORT": str(port)}
        given = {"left": left, "part": part, "only": {**self._own, **meeting}}
        message = {"run": _written(self._run), "plan": plan.to_dict(), **given}
        answer = self._asked(message, left)
        answers = self._ranks.all_gather_typed(answer, _ANSWER)
        return concluded(answers[0].seconds, [each.failure for each in answers], left)

    def _asked(self, message: Mapping[str, Any], left: float) -> _Answer:
        """The helper's answer to one message."""
        stdin = self._helper.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # a helper that has ended answers nothing
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
        while (line := self._answer(left + _ENDING)) == _READY:  # it has taken longer than expected to get ready
            pass
        if not line:
            return _Answer((), Failure(int(self._own["RANK"]), "the process that tries plans for it has ended"))
        return _ANSWER.decode(line.encode())

    def _answer(self, patience: float) -> str:
        """The next line that the helper says; empty if it has ended, or says nothing for so many seconds."""
        stdout = self._helper.stdout
        assert stdout is not None
        return stdout.readline() if select.select([stdout], [], [], patience)[0] else ""


_ANSWER: Final = Typed[_Answer](_Answer)


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
        run, plan = _read(message["run"]), Plan.parse(message["plan"])
        seconds, failure = run_lap(run, plan, message["left"], message["part"], message["only"])
        answers.write(_ANSWER.encode(_Answer(tuple(seconds), failure)).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()

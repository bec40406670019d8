"""A lap: the first steps of a run under one plan, timed by one rank among the others, to compare plans before a run."""

from __future__ import annotations

import itertools
import time
from typing import Final

import torch

from thinwire.collectives.group import control
from thinwire.train.data.packing import Dataset
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.measuring.room import explained_exhaustion, measure_room
from thinwire.train.trainer import Trainer

WARM_UP: Final = 2
"""Steps that do not count: connections are made, memory is taken, nothing of an earlier step is on its way."""
LEAST: Final = 3
"""Steps to time at least, if there is time."""
MOST: Final = 10
"""Steps to time at most."""
ENOUGH: Final = 2.0
"""Seconds of timed steps after which fewer than :data:`MOST` will do."""


def timed_steps(run: ResolvedRun, dataset: Dataset, device: torch.device, deadline: float, soon: float) -> list[float]:
    """Make the first steps of a run until a deadline of :func:`time.monotonic`; until ``soon`` if :data:`LEAST` are
    timed by then. Collective; the ranks agree on the last one. Returns the seconds of the steps after the first
    :data:`WARM_UP`; none if there was no time for any."""
    rank, room = control().rank, measure_room(device)
    with explained_exhaustion(rank, "building the model", room):
        trainer = Trainer(run, dataset, device)
        trainer.prepare_data()
    seconds: list[float] = []
    with explained_exhaustion(rank, "training", room):
        for number in itertools.count(1):
            begun = time.monotonic()
            timed = seconds[WARM_UP:]
            over = begun + max(seconds, default=0.0)
            late = over > deadline
            enough = number >= WARM_UP + MOST or (len(timed) >= LEAST and (sum(timed) >= ENOUGH or over > soon))
            stop = trainer.step(late or enough).stop
            seconds.append(time.monotonic() - begun)
            if stop:
                break
    return seconds[WARM_UP:]

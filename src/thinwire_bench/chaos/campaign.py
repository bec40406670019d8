"""A campaign: many trials by one seed, with a log from which it goes on."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from thinwire.errors import UsageError
from thinwire_bench.chaos.incidents import CABLED, INCIDENTS, MOUNTED
from thinwire_bench.chaos.setups import Setup, make_corpus, setups
from thinwire_bench.chaos.trial import Settings, Trial, Verdict, conduct

__all__ = ["PER_CABLED", "PER_TRIAL", "campaign", "make_trials", "read_log"]

PER_TRIAL: Final = 7
"""Incidents of a run on this machine's own network."""

PER_CABLED: Final = 3
"""Incidents of a run in a lab."""


def make_trials(seed: int, *, mounts: bool, cables: bool, chosen: Sequence[Setup] | None = None) -> list[Trial]:
    """The trials of a campaign. Every kind of incident comes equally often; the seed decides to whom and when.

    Args:
        seed: Of everything that is drawn.
        mounts: Whether file systems can be mounted; otherwise disks stay as they are.
        cables: Whether there are labs; otherwise no link is cut.
        chosen: The runs; all of them by default.
    """
    chance = random.Random(seed)
    kinds = [kind for kind in INCIDENTS if kind not in CABLED and (mounts or kind not in MOUNTED)]
    deck: list[str] = []
    trials = []
    for setup in chosen or setups():
        drawn = []
        for _ in range(PER_TRIAL):
            if not deck:
                deck = chance.sample(kinds, len(kinds))
            drawn.append(deck.pop())
        trials.append(Trial(setup, tuple(drawn), chance.randrange(2**32)))
        if cables and setup.group == "preset":
            cuts = [CABLED[0], CABLED[1], CABLED[0]]
            chance.shuffle(cuts)
            trials.append(Trial(setup, tuple(cuts), chance.randrange(2**32), cabled=True))
    return trials


def campaign(
    trials: Sequence[Trial], settings: Settings, log: Path, *, seed: int, minutes: float, report: Callable[[str], None]
) -> list[Verdict]:
    """Conduct the trials that the log lacks, until time is over.

    Args:
        trials: All trials of the campaign.
        settings: Of the campaign.
        log: One JSON object a line: the seed, then verdicts.
        seed: The campaign's; a log of another is refused.
        minutes: No trial begins after that.
        report: Called with lines on what happens.

    Returns:
        All verdicts so far.
    """
    verdicts = read_log(log, seed)
    done = {verdict.trial for verdict in verdicts}
    make_corpus(settings.corpus)
    began = time.monotonic()
    for trial in trials:
        if trial.name in done:
            continue
        if time.monotonic() - began > 60 * minutes:
            report(f"{len(verdicts)} of {len(trials)} trials after {minutes:g} minutes; the same command continues")
            break
        report(f"{trial.name}: {trial.setup.source}, {', '.join(trial.kinds)}")
        verdict = conduct(trial, settings, report)
        verdicts.append(verdict)
        if not log.exists():
            log.write_text(json.dumps({"seed": seed}) + "\n", encoding="utf-8")
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict.to_dict()) + "\n")
        report(f"{trial.name}: {'equal' if verdict.equal else f'UNEQUAL: {verdict.about}'}, {verdict.seconds:.0f} s")
    return verdicts


def read_log(log: Path, seed: int | None = None) -> list[Verdict]:
    """The verdicts of a log; none if there is no file.

    Raises:
        UsageError: It is no such log, or one of another seed.
    """
    if not log.is_file():
        return []
    try:
        head, *lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        if seed is not None and head["seed"] != seed:
            raise UsageError(f"{log} belongs to seed {head['seed']}, not {seed}; choose another --log")
        return [Verdict.from_dict(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{log} is no log of a campaign: {error}; choose another --log") from error

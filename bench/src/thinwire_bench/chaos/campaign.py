"""A campaign: many trials by one seed, with a log from which it goes on.

The trial that comes next is the one that adds most to what has happened so far: runs, sources of data, and kinds of
incident to presets, to codecs, to schedules and in the lab. Once all trials are through, they come again with other
incidents.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from thinwire.errors import UsageError
from thinwire_bench.chaos.incidents import CABLED, INCIDENTS, MOUNTED
from thinwire_bench.chaos.setups import make_corpus, setups
from thinwire_bench.chaos.trial import CampaignSettings, Trial, TrialVerdict, conduct

_QUICK: Final = (
    "a rank is killed", "two ranks are killed", "a rank is paused", "all are paused",
)  # fmt: skip
"""Kinds of seconds, as the launcher goes on: most of a run's incidents are of these."""

_QUICK_ONES: Final = 10
_SLOW_ONES: Final = 3
"""Incidents of a run, quick and slow ones."""

_CUTS: Final = (CABLED[0], CABLED[1], CABLED[0])
"""Incidents of a run in a lab, in some order."""


def make_trials(
    seed: int, *, mounts: bool, cables: bool, chosen: Collection[str] | None = None, turn: int = 0
) -> list[Trial]:
    """The trials of a campaign. Every kind of incident comes in its turn; the seed decides to whom and when.

    Args:
        seed: Of everything that is drawn.
        mounts: Whether file systems can be mounted; otherwise disks stay as they are.
        cables: Whether there are labs; otherwise no link is cut.
        chosen: Names of runs to keep; all by default. What happens to a run does not depend on it.
        turn: How often the campaign has gone through all trials before.
    """
    chance = random.Random(f"{seed}/{turn}" if turn else seed)
    left_out = {*CABLED, *_QUICK, *(() if mounts else MOUNTED)}
    quick, slow = _dealt(_QUICK, chance), _dealt([kind for kind in INCIDENTS if kind not in left_out], chance)
    trials = []
    for setup in setups():
        drawn = [*itertools.islice(quick, _QUICK_ONES), *itertools.islice(slow, _SLOW_ONES)]
        chance.shuffle(drawn)
        trials.append(Trial(setup, tuple(drawn), chance.randrange(2**32), turn=turn))
        cut = Trial(setup, tuple(chance.sample(_CUTS, len(_CUTS))), chance.randrange(2**32), cabled=True, turn=turn)
        trials += [cut] if setup.group == "preset" else []
    kept = [trial for trial in trials if chosen is None or trial.setup.name in chosen]
    return [trial for trial in kept if cables or not trial.cabled]


def _dealt(kinds: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Kinds without end, every one once before one comes again."""
    while True:
        yield from reversed(chance.sample(kinds, len(kinds)))


def next_trial(trials: Sequence[Trial], verdicts: Iterable[TrialVerdict]) -> Trial | None:
    """The trial that adds most to what has happened for the number of its incidents, which take the time; the first of
    equals, and ``None`` if all have been conducted."""
    done, happened = set[str](), set[tuple[str, ...]]()
    for verdict in verdicts:
        done.add(verdict.trial)
        kinds = [incident.kind for incident in verdict.incidents if incident.step is not None]
        happened |= _aspects(verdict.run, verdict.group, verdict.source, kinds)

    def adds(trial: Trial) -> float:
        setup = trial.setup
        return len(_aspects(setup.name, setup.group, setup.source, trial.kinds) - happened) / len(trial.kinds)

    return max((trial for trial in trials if trial.name not in done), key=adds, default=None)


def _aspects(run: str, group: str, source: str, kinds: Iterable[str]) -> set[tuple[str, ...]]:
    """What a trial covers."""
    of_kinds = {("kind", group, kind) for kind in kinds}
    cut = {("cut", run)} if any(kind in CABLED for _, _, kind in of_kinds) else {("run", run)}
    return {("source", group, source), *cut, *of_kinds}


def campaign(
    turns: Callable[[int], Sequence[Trial]],
    settings: CampaignSettings,
    log: Path,
    *,
    seed: int,
    minutes: float,
    report: Callable[[str], None],
) -> list[TrialVerdict]:
    """Conduct trials that the log lacks, none of which begins after so many minutes; returns all verdicts so far.

    ``turns`` gives all trials of a turn by its number; see :func:`make_trials`. The log has one JSON object a line: the
    seed, then verdicts; a log of another seed is refused.
    """
    verdicts = read_log(log, seed)
    make_corpus(settings.corpus)
    began, turn = time.monotonic(), 0
    while time.monotonic() - began < 60 * minutes:
        trial = next_trial(turns(turn), verdicts)
        if trial is None:
            turn += 1
            continue
        report(f"{trial.name}: {trial.setup.source}, {', '.join(trial.kinds)}")
        verdict = conduct(trial, settings, report)
        verdicts.append(verdict)
        if not log.exists():
            log.write_text(json.dumps({"seed": seed}) + "\n", encoding="utf-8")
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")
        outcome = "equal" if verdict.equal else f"UNEQUAL: {verdict.about}"
        report(f"{trial.name}: {outcome}, {verdict.seconds:.0f} s")
    done, trials = {verdict.trial for verdict in verdicts}, turns(turn)
    through = sum(trial.name in done for trial in trials)
    report(f"{through} of {len(trials)} trials of turn {turn + 1} are through; the same command continues")
    return verdicts


def read_log(log: Path, seed: int | None = None) -> list[TrialVerdict]:
    """The verdicts of a log; none if there is no file.

    Raises:
        UsageError: It is no such log, or one of another seed.
    """
    if not log.is_file():
        return []
    try:
        head, *lines = log.read_text(encoding="utf-8").splitlines()
        known = json.loads(head)["seed"]
        if seed is not None and known != seed:
            raise UsageError(f"{log} belongs to seed {known}, not {seed}; choose another --log")
        return [TypeAdapter(TrialVerdict).validate_json(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{log} is no log of a campaign: {error}; choose another --log") from error

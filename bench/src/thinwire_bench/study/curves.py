"""The record of a finished run: its raw metrics, recipe and plan, in one file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from thinwire.errors import SpecError, UsageError
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory, write_atomically
from thinwire.train.observing.metrics import read as read_metrics
from thinwire.train.updates import MOST_SKIPPED
from thinwire_bench.study.arms import StudyRun
from thinwire_bench.study.loop import Loop

_FIELDS: Final = ("step", "tokens", "loss", "val_loss", "grad_norm", "lr", "skipped")
"""The metrics of each step that a study keeps; None stands for a value that was not finite or not measured."""


@dataclass(frozen=True)
class Curve:
    """A finished run.

    Attributes:
        arm: Name of the arm.
        seed: Seed of weights and samples.
        recipe: The recipe of the run; a preset is not resolved in it.
        plan: The resolved plan of the recipe.
        dataset: Fingerprint of the tokens.
        versions: Versions of the software.
        diverged: Whether the run ended because its loss or gradients were no longer finite.
        records: Metrics of every step.
        loop: What trained it; None for ``thinwire train``.
        trunk_steps: Steps that it has in common with the baseline's run of its seed; of others, records begin after it.
        trunk_seed: The seed of that run; None for the run itself, and without a trunk.
        trunk_checksum: SHA-256 of the trunk's checkpoint; None without a trunk.
    """

    arm: str
    seed: int
    recipe: Mapping[str, Any]
    plan: Mapping[str, Any]
    dataset: str | None
    versions: Mapping[str, str]
    diverged: bool
    records: Sequence[Mapping[str, Any]]
    loop: Mapping[str, Any] | None = None
    trunk_steps: int = 0
    trunk_seed: int | None = None
    trunk_checksum: str | None = None

    @property
    def made_of(self) -> dict[str, Any]:
        """Recipe, plan, loop and trunk; keys that came to be since the run have their defaults."""
        try:
            loop = None if self.loop is None else Loop.parse(self.loop)
            return _made_of(Recipe.parse(self.recipe), Plan.parse(self.plan), loop, (self.trunk_steps, self.trunk_seed))
        except SpecError:  # a key or a value that is no more
            trunk = [self.trunk_steps, self.trunk_seed]
            return {"recipe": self.recipe, "plan": self.plan, "loop": self.loop, "trunk": trunk}

    @property
    def final_loss(self) -> float | None:
        """Last validation loss in nats per token; None for a run that diverged."""
        losses = [record["val_loss"] for record in self.records if record["val_loss"] is not None]
        return None if self.diverged or not losses else float(losses[-1])

    @classmethod
    def from_directory(cls, run: StudyRun, directory: RunDirectory) -> Self | None:
        """The curve of a run that has ended by itself.

        Args:
            run: The run of the study.
            directory: Directory of the run.

        Returns:
            The curve; None where the run has neither reached its last step nor diverged.
        """
        records = [{name: record[name] for name in _FIELDS} for record in read_metrics(directory.metrics)]
        finished = directory.summary.is_file()
        # A run that skips fewer steps may have been interrupted while it did, and may recover.
        newest = records[-MOST_SKIPPED:]
        diverged = len(newest) == MOST_SKIPPED and all(record["skipped"] for record in newest)
        if not finished and not diverged:
            return None
        summary = json.loads(directory.summary.read_text()) if finished else {}
        return cls(
            arm=run.arm,
            seed=run.seed,
            recipe=run.recipe.to_dict(),
            plan=run.plan.to_dict(),
            dataset=summary.get("dataset"),
            versions=json.loads(directory.versions.read_text()),
            diverged=not finished,
            records=records,
            loop=None if run.loop is None else run.loop.to_dict(),
            trunk_steps=run.trunk_steps,
            trunk_seed=None if run.trunk is None else run.trunk.seed,
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that :meth:`save` wrote.

        Raises:
            UsageError: it is no such file.
        """
        try:
            head, *records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            return cls(**head, records=records)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} does not hold a run of a study ({error}); delete it to run it again") from error

    def save(self, path: Path) -> None:
        """Write one line of what it is, then one for each step."""
        head = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "records"}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(head), *(json.dumps({name: _short(record[name]) for name in record})
                                     for record in self.records)]  # fmt: skip
        write_atomically(path, "".join(f"{line}\n" for line in lines))


class Curves:
    """The finished runs of a study, in a directory of files.

    Args:
        directory: Directory with one file for each run; it need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, run: StudyRun) -> Path:
        """The file of a run's curve."""
        return self.directory / f"{run.name}.jsonl"

    def read(self, runs: Sequence[StudyRun]) -> list[Curve]:
        """The curves that are there.

        Args:
            runs: Runs of the study.

        Returns:
            Those of `runs` that have finished, in that order.

        Raises:
            UsageError: a file is of another recipe than its run's, or two were made with different tokens, or from
                different trunks of one seed.
        """
        curves = []
        for run in runs:
            if not (path := self.path(run)).is_file():
                continue
            curve = Curve.load(path)
            if differing := _differences(curve.made_of, made_of(run)):
                raise UsageError(
                    f"{path} was made another way than this study's runs ({', '.join(differing)}); "
                    "delete it to run it again, or choose another --results"
                )
            curves.append(curve)
        self._check_tokens(curves)
        self._check_trunks(curves)
        return curves

    def _check_tokens(self, curves: Sequence[Curve]) -> None:
        made = {curve.dataset for curve in curves if curve.dataset is not None}
        if len(made) > 1:
            raise UsageError(
                f"the runs in {self.directory} were made with {len(made)} different sets of tokens (another machine's "
                "text or tokenizer); a study needs one: choose another --results"
            )

    def _check_trunks(self, curves: Sequence[Curve]) -> None:
        trunks: dict[int, set[str | None]] = {}
        for curve in (curve for curve in curves if curve.trunk_steps):
            seed = curve.seed if curve.trunk_seed is None else curve.trunk_seed
            trunks.setdefault(seed, set()).add(curve.trunk_checksum)
        for seed, checksums in trunks.items():
            if len(checksums) > 1:
                raise UsageError(
                    f"the runs in {self.directory} start from {len(checksums)} different trunks of seed {seed}, which "
                    "machines that round differently have trained; a study needs one: delete the runs of one of them, "
                    "or choose another --results"
                )


def made_of(run: StudyRun) -> dict[str, Any]:
    """Recipe, plan, loop and trunk of a run, as its curve has them."""
    return _made_of(run.recipe, run.plan, run.loop, (run.trunk_steps, None if run.trunk is None else run.trunk.seed))


def _made_of(recipe: Recipe, plan: Plan, loop: Loop | None, trunk: tuple[int, int | None]) -> dict[str, Any]:
    """Recipe, plan, loop and trunk of a run, with the plan resolved."""
    return {
        "trunk": list(trunk),
        "loop": None if loop is None else loop.to_dict(),
        "recipe": {key: value for key, value in recipe.to_dict().items() if key != "plan"},
        "plan": {key: value for key, value in plan.to_dict().items() if key != "name"},
    }


def _short(value: Any) -> Any:
    """Seven digits: what fp32 has."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys in which two tables differ."""
    differing = []
    for key in sorted({*one, *other}):
        mine, theirs = one.get(key), other.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            differing += _differences(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            differing.append(f"{prefix}{key}")
    return differing

"""The file of a convergence study: what it compares, and the runs that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Depth, Flag, Positive, Problem, Spec, rule
from thinwire.spec.factor import Factor
from thinwire.spec.io import read_toml_file
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.environment import resolve_plan
from thinwire_bench.study.loop import Loop

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._]*(-[A-Za-z0-9+._]+)*")


class Arm(Spec):
    """One way to train."""

    name: str = Field(description="names files too: letters, digits and + . _ -")
    about: str = Field(default="", description="in a few words, for the table")
    plan: dict[str, Any] = Field(
        description="plan of the arm, as in a recipe: a preset and the keys to change, or a whole plan; of a peer, the "
        "micro-batches"
    )
    ranks: Factor | None = Field(default=None, description="ranks of its runs; unset: the recipe's cluster.without_gpu")
    loop: Loop | None = Field(default=None, description="what trains it; unset: thinwire train")
    shown: Flag = Field(default=True, description="whether a picture of losses over time shows it")

    @rule("name")
    def _names_a_file(self) -> Iterator[Problem]:
        if not _NAME.fullmatch(self.name):
            yield Problem("name", f"= {self.name!r} should be letters, digits and + . _, with single - between them")


class LossGoal(Spec):
    """A goal for one arm; a missed goal is reported but is not an error."""

    arm: str = Field(description="name of the arm")
    within_percent: Positive | None = Field(default=None, description="mean loss at most so far above the baseline's")
    better_than: str | None = Field(default=None, description="mean loss below this arm's")
    sooner_than: str | None = Field(default=None, description="reaches the target loss before this arm, on every link")


class StudySpec(Spec):
    """A convergence study: one recipe, several arms, several seeds."""

    recipe: str = Field(description="of every run, relative to the study's file")
    tokens: Count = Field(description="of a run; whole steps, rounded up")
    seeds: tuple[Depth, ...] = Field(min_length=1, description="each arm runs once with each")
    baseline: str = Field(description="the arm that the others are compared with")
    trunk: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0,
        description="share of the steps that all arms of a seed have in common, rounded down: the others start from "
        "the baseline's checkpoint",
    )
    trunk_seed: Depth | None = Field(
        default=None,
        description="seed of the one trunk that the runs of all seeds start from: they differ in their samples, not in "
        "their first weights; unset: a trunk for each seed",
    )
    target_percent: Positive | None = Field(
        default=None, description="the loss whose time is compared, so far above the baseline's mean"
    )
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)] = Field(description="arms to compare")
    goals: tuple[LossGoal, ...] = Field(default=(), description="losses that arms should reach")

    @rule("trunk", "trunk_seed")
    def _trunk_has_a_run(self) -> Iterator[Problem]:
        if self.trunk_seed is not None and self.trunk == 0:
            yield Problem("trunk_seed", f"= {self.trunk_seed} has no trunk: set trunk to its share of the steps")

    @rule("arms", "baseline", "goals", "seeds")
    def _names_are_arms(self) -> Iterator[Problem]:
        names = [arm.name for arm in self.arms]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem("arms", f"has two arms {name!r}; name each once")
        if len(set(self.seeds)) < len(self.seeds):
            yield Problem("seeds", f"= {list(self.seeds)} names a seed twice")
        used = [("baseline", self.baseline)]
        for goal in self.goals:
            used += [("goals", name) for name in (goal.arm, goal.better_than, goal.sooner_than) if name]
        for key, name in used:
            if name not in names:
                yield Problem(key, f"names {name!r}, which is no arm; valid are {', '.join(names)}")


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        arm: Name of the arm.
        seed: Seed of weights and samples.
        recipe: The recipe of the run; a preset is not resolved in it.
        plan: The resolved plan of the recipe.
        loop: What trains it; None for ``thinwire train``.
        trunk: The run whose first steps it has in common; None for one that starts from the beginning.
        trunk_steps: How many steps these are.
    """

    arm: str
    seed: int
    recipe: Recipe
    plan: Plan
    loop: Loop | None = None
    trunk: StudyRun | None = None
    trunk_steps: int = 0

    @property
    def name(self) -> str:
        """Names its directory and its file of metrics."""
        return f"{self.arm}-seed{self.seed}"

    @property
    def steps(self) -> int:
        """Optimizer updates, those of its trunk among them."""
        return self.recipe.train.steps


@dataclass(frozen=True)
class LossStudy:
    """A study and its runs.

    Attributes:
        spec: Specification from the file, changed by the options of the command.
        runs: all of them, the first seed of every arm before the second of any: an interrupted study has
            whole comparisons.
    """

    spec: StudySpec
    runs: Sequence[StudyRun]

    @classmethod
    def read(cls, path: Path, changes: Mapping[str, Any], settings: Sequence[str] = ()) -> Self:
        """Read a study.

        Args:
            path: The TOML file.
            changes: Keys of the study to replace.
            settings: Keys of the recipe to replace, each as ``dotted.key=value``.

        Returns:
            The study.

        Raises:
            SpecError: naming every problem of the study, or of the recipe of an arm.
        """
        spec = StudySpec.parse({**read_toml_file(path), **changes}, str(path))
        recipe_path = path.resolve().parent / spec.recipe
        base = Recipe.read(recipe_path, settings)
        if base.train.global_batch is None:
            raise SpecError(str(recipe_path), ["train.global_batch is not set; a study needs it to count tokens"])
        steps = -(-spec.tokens // (base.train.global_batch * base.train.seq))
        trunk = int(spec.trunk * steps)
        runs = [_run(base, arm, seed, steps) for seed in spec.seeds for arm in spec.arms]
        if not trunk:
            return cls(spec, runs)
        baseline = next(arm for arm in spec.arms if arm.name == spec.baseline)
        seeds = {seed: seed if spec.trunk_seed is None else spec.trunk_seed for seed in spec.seeds}
        trunks = {seed: _keeping(_run(base, baseline, of, steps), trunk) for seed, of in seeds.items()}
        return cls(spec, [_from_trunk(run, trunks[run.seed]) for run in runs])


def _from_trunk(run: StudyRun, trunk: StudyRun) -> StudyRun:
    """A run of a study with trunks: a run of the baseline keeps a checkpoint, and the others start from it."""
    return trunk if run.name == trunk.name else replace(run, trunk=trunk, trunk_steps=trunk.trunk_steps)


def _keeping(run: StudyRun, steps: int) -> StudyRun:
    """A run that keeps all checkpoints, and makes one after as many steps."""
    kept = run.recipe.checkpoint.with_(every=steps, keep=run.steps)
    return replace(run, recipe=run.recipe.with_(checkpoint=kept), trunk_steps=steps)


def _run(base: Recipe, arm: Arm, seed: int, steps: int) -> StudyRun:
    """One run: the arm's plan and the seed; a mistake in an arm is found here, before anything runs."""
    recipe = base.with_(plan=arm.plan, train=base.train.with_(steps=steps, seed=seed))
    if arm.ranks is not None:
        recipe = recipe.with_(cluster=recipe.cluster.with_(without_gpu=arm.ranks))
    return StudyRun(arm.name, seed, recipe, resolve_plan(recipe, None), arm.loop)


def changes(tokens: int | None, seeds: str | None) -> dict[str, Any]:
    """The keys of a study that options of a command replace.

    Args:
        tokens: Tokens of a run; None leaves the study's.
        seeds: Seeds between commas; None leaves the study's.

    Raises:
        SpecError: ``seeds`` is no list of numbers.
    """
    changed: dict[str, Any] = {} if tokens is None else {"tokens": tokens}
    if seeds is not None:
        try:
            changed["seeds"] = [int(word) for word in seeds.split(",")]
        except ValueError:
            raise SpecError("--seeds", [f"{seeds!r} is not a list of whole numbers such as 0,1,2"]) from None
    return changed

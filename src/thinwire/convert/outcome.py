"""The outcome of a conversion: one row for each key of the source, and the plan and recipe that the rows add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from thinwire.errors import SpecError, UsageError
from thinwire.spec import Factor, Plan
from thinwire.spec.io import write_toml
from thinwire.spec.models.huggingface import tagged
from thinwire.spec.models.model import ModelSpec
from thinwire.spec.recipe import Recipe, model_table

Action = Literal["mapped", "ignored", "refused"]


@dataclass(frozen=True)
class Judgement:
    """What becomes of one key.

    Attributes:
        action: Whether the key is mapped, ignored or refused.
        text: The reason, and the remedy of a refusal; a note or nothing for a mapped key.
        plan: Values of the plan by dotted key.
        recipe: Values of the recipe by dotted key.
    """

    action: Action
    text: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """Values of the plan and of the recipe, which have no keys in common."""
        return {**self.plan, **self.recipe}

    @property
    def shown(self) -> str:
        """The mapped values and the text, in one line."""
        parts = [f"{key} = {_toml_like(value)}" for key, value in self.plan.items()]
        parts += [f"recipe {key} = {_toml_like(value)}" for key, value in self.recipe.items()]
        values = ", ".join(parts)
        return f"{values} ({self.text})" if values and self.text else values or self.text


ON_HOST: Final[Mapping[str, Any]] = {"residence.optimizer": "host-stream", "residence.gradients": "host"}
"""Fields of a plan whose optimizer states and gradients live on the host."""

PARAMS_ON_HOST: Final[Mapping[str, Any]] = {"residence.params": "host"}
"""Fields of a plan whose parameters live on the host."""


def mapped(
    *, plan: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None, note: str = ""
) -> Judgement:
    """The judgement on a key that becomes values of the plan or the recipe."""
    return Judgement("mapped", note, plan or {}, recipe or {})


def ignored(reason: str) -> Judgement:
    """The judgement on a key that has no counterpart and needs none."""
    return Judgement("ignored", reason)


def refused(reason: str) -> Judgement:
    """The judgement on a key without which training would differ from what the source describes."""
    return Judgement("refused", reason)


@dataclass(frozen=True)
class Row:
    """One key of the source, dotted, and what becomes of it."""

    key: str
    value: Any
    judgement: Judgement

    @property
    def shown_value(self) -> str:
        """The value as JSON; a date of TOML as text."""
        return json.dumps(self.value, default=str)

    def to_dict(self) -> dict[str, Any]:
        """The row as ``--json`` prints it; infinities and NaN as ``transformers`` writes them."""
        judgement = self.judgement
        return {
            "key": self.key,
            "value": tagged(self.value),
            "action": judgement.action,
            "text": judgement.text,
            "plan": {key: _plain(value) for key, value in judgement.plan.items()},
            "recipe": tagged(judgement.recipe),
        }


def without_contradictions(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows; one that sets a key to another value than a row above it does is refused."""
    setters: dict[str, Row] = {}
    for row in rows:
        values = row.judgement.values
        clash = next(
            (key for key, value in values.items() if setters.setdefault(key, row).judgement.values[key] != value), None
        )
        if clash is None:
            yield row
        else:
            other = setters[clash]
            shown = _toml_like(other.judgement.values[clash])
            yield replace(row, judgement=refused(f"{other.key} sets {clash} = {shown}; leave one of the two out"))


@dataclass(frozen=True)
class Conversion:
    """A converted configuration.

    Attributes:
        what: Name of the source, for messages.
        ranks: Ranks of a node, and nodes; tensor-parallel ranks included.
        base: Values of the plan by dotted key where the source leaves out a key.
        rows: One row for each key of the source, in its order, and for each absent key whose default has to be set.
    """

    what: str
    ranks: Factor
    base: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def refusals(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.judgement.action == "refused")

    def check(self) -> None:
        """Check that no key is refused.

        Raises:
            SpecError: A key is refused; the error lists all of them, with remedies.
        """
        if self.refusals:
            problems = [f"{row.key} = {row.shown_value}: {row.judgement.text}" for row in self.refusals]
            raise SpecError(self.what, [*problems, "--drop KEY leaves a key out"])

    def plan_table(self) -> dict[str, Any]:
        """The keys of the plan that the source sets, as nested tables."""
        flat = dict(self.base)
        for row in self.rows:
            flat |= row.judgement.plan
        return _nested(flat)

    def plan(self) -> Plan:
        """The plan.

        Raises:
            SpecError: A key is refused, or the plan breaks a rule.
        """
        self.check()
        return Plan.parse(self.plan_table(), self.what)

    def recipe_toml(
        self, *, model: str | None, steps: int | None, seq: int | None = None, plan_file: str | None = None
    ) -> str:
        """The recipe as TOML text, with what the source does not contain.

        Args:
            model: Preset, Hugging Face directory or ``config.json``; None if the user named none.
            steps: Number of optimizer updates; None to take that of the source's scheduler.
            seq: Tokens per sequence; None for the recipe's default.
            plan_file: The plan's file, relative to the recipe; None to write the plan into the recipe.

        Raises:
            SpecError: A key is refused, or the recipe breaks a rule.
            UsageError: The model or the number of steps is missing.
        """
        self.check()
        flat: dict[str, Any] = {}
        for row in self.rows:
            flat |= row.judgement.recipe
        if model is None:
            raise UsageError("a recipe needs a model, which the source does not name: add --model NAME|DIR|config.json")
        steps = steps or flat.get("train.steps")
        if steps is None:
            raise UsageError("a recipe needs train.steps, which the source does not contain: add --steps N")
        flat["train.steps"] = steps
        if seq is not None:
            flat["train.seq"] = seq
        flat |= {"cluster.nodes": self.ranks.nodes, "cluster.nproc": self.ranks.local}
        table = {"plan": plan_file or _plain(self.plan_table()), "model": _model(model), **_nested(flat)}
        Recipe.parse(table, f"the recipe converted from {self.what}")
        return write_toml(table)

    def to_dict(self) -> dict[str, Any]:
        """The conversion as ``--json`` prints it; ``plan`` is null if a key is refused."""
        return {
            "source": self.what,
            "rows": [row.to_dict() for row in self.rows],
            "refused": len(self.refusals),
            "plan": None if self.refusals else self.plan().to_dict(),
        }


def _model(name: str) -> dict[str, Any]:
    """The recipe's ``model`` table for a preset or a path."""
    if name in ModelSpec.preset_names():
        return {"preset": name}
    if not Path(name).expanduser().exists():
        raise SpecError(
            "--model",
            f"{name} is neither a path nor a published shape; the shapes are {', '.join(ModelSpec.preset_names())}",
        )
    return model_table(name)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for dotted, value in flat.items():
        *path, key = dotted.split(".")
        table = tables
        for name in path:
            table = table.setdefault(name, {})
        table[key] = value
    return tables


def _plain(value: Any) -> Any:
    if isinstance(value, Factor):
        return value.to_dict()
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _toml_like(value: Any) -> str:
    return str(value) if isinstance(value, Factor) else json.dumps(value)

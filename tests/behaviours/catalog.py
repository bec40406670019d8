"""Behaviours, and the decorator that adds one to the catalogue.

A behaviour is a function of a :class:`~tests.behaviours.context.Context`. It runs once in a single process on plain
torch, with the data of all ranks, and once on every rank. Both must return the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.behaviours.context import Context

__all__ = ["REFUSED", "SUBJECTS", "Behaviour", "behaviour", "catalogue"]

SUBJECTS: dict[str, str] = {
    "training": "Training loops",
    "optimizers": "Optimizers and schedulers",
    "gradients": "Gradients, clipping and hooks",
    "parameters": "Reading and writing parameters",
    "frozen": "Freezing and unfreezing",
    "calls": "What is called, and with what",
    "layers": "Kinds of layers and parameters",
    "states": "State dicts, checkpoints and copies",
    "uneven": "Ranks that do different work",
    "parts": "Sharding in parts, precision and plans",
}
"""Modules of ``tests.behaviours.catalogue`` and the headings of ``docs/compatibility.md``."""


REFUSED: dict[str, str] = {
    "ordinary": "Ordinary programs",
    "unlike ranks": "Programs in which ranks do different work",
    "own calls": "Calls that have no counterpart in FSDP2",
}
"""What is refused, by the subject of a behaviour and by its counterpart in FSDP2: kinds, and their headings."""


@dataclass(frozen=True)
class Behaviour:
    """One thing that a user does.

    Attributes:
        name: of its function.
        subject: a key of :data:`SUBJECTS`.
        does: what the user does, in one sentence.
        origin: the test or the idiom that it comes from.
        function: does it and returns what has to be equal.
        refused: the sentence that thinwire raises, as a regular expression, by preset; ``"*"`` stands for the others.
        tolerance: largest relative difference of a tensor's norm.
        some_ranks: a refusal on some ranks counts, where the others have no part in the call.
        deepspeed: what DeepSpeed's documentation or tests say, in a few words; empty if we know of no statement.
        fsdp2: in place of a measurement, where FSDP2 has no counterpart of the call.
        slow: left out of the default suite.
    """

    name: str
    subject: str
    does: str
    origin: str
    function: Callable[[Context], Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-5
    some_ranks: bool = False
    deepspeed: str = ""
    fsdp2: str = ""
    slow: bool = False

    @property
    def kind(self) -> str:
        """Whose program it is, where it is refused; a key of :data:`REFUSED`."""
        if self.subject == "uneven":
            return "unlike ranks"
        return "own calls" if self.fsdp2 == "no counterpart" else "ordinary"

    def refusal(self, preset: str) -> str | None:
        """The sentence expected under a preset, as a regular expression; ``None`` if it has to work."""
        return self.refused.get(preset, self.refused.get("*"))


_catalogue: dict[str, Behaviour] = {}


def behaviour(
    origin: str,
    *,
    refused: str | Mapping[str, str] = "",
    tolerance: float = 1e-5,
    some_ranks: bool = False,
    deepspeed: str = "",
    fsdp2: str = "",
    slow: bool = False,
) -> Callable[[Callable[[Context], Any]], Callable[[Context], Any]]:
    """Add a function to the catalogue; the first paragraph of its docstring says what the user does.

    Args:
        origin: as in :class:`Behaviour`, as the other arguments are.
        refused: one sentence for all presets, or one for each.
        tolerance: of the comparison.
        some_ranks: whether a refusal on some ranks counts.
        deepspeed: for the page.
        fsdp2: for the page.
        slow: whether the default suite leaves it out.
    """
    by_preset = ({"*": refused} if refused else {}) if isinstance(refused, str) else refused

    def add(function: Callable[[Context], Any]) -> Callable[[Context], Any]:
        name, subject = function.__name__, function.__module__.rsplit(".", 1)[-1]
        assert name not in _catalogue, f"two behaviours are called {name}"
        assert function.__doc__, f"{name} does not say what the user does"
        does = " ".join(function.__doc__.split("\n\n")[0].split())
        _catalogue[name] = Behaviour(
            name, subject, does, origin, function, by_preset, tolerance, some_ranks, deepspeed, fsdp2, slow
        )
        return function

    return add


def catalogue() -> dict[str, Behaviour]:
    """Every behaviour by name, in the order of subjects."""
    for subject in SUBJECTS:
        importlib.import_module(f"tests.behaviours.catalogue.{subject}")
    return dict(_catalogue)

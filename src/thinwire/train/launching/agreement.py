"""Comparison of the ranks' settings before any of them trains.

The plan and the shapes of the model are compared where the model is sharded. This module compares everything else that
would let ranks diverge silently or wait for each other forever: a different learning rate, other tokens, or another
checkpoint interval.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any, Final

from thinwire.agreement import Typed
from thinwire.collectives.group import Control
from thinwire.errors import MismatchError, UsageError
from thinwire.spec.models.huggingface import computed_with
from thinwire.spec.recipe import Recipe
from thinwire.train.environment import versions

_HOST_AND_VALUES: Final[Typed[tuple[str, dict[str, str]]]] = Typed(tuple[str, dict[str, str]])

_SECTIONS: Final = ("model", "train", "optimizer", "average", "loss_scale", "checkpoint", "publish")
"""Sections of a recipe that must be equal."""

_PLACES: Final = ("model.path", "model.config")
"""Keys that may differ from host to host: the same model may lie elsewhere. What it computes is compared."""

_PACKAGES: Final = ("thinwire", "torch")
"""Packages whose versions must be equal, because they define the messages between ranks."""


def agree(ranks: Control, recipe: Recipe, fingerprint: str) -> tuple[str, ...]:
    """Compare software, recipe and tokens with the other ranks. Every rank calls it and gets the name of each rank's
    host, by rank.

    Raises:
        MismatchError: On every rank; names two ranks and their values.
        UsageError: On every rank, if one of them cannot read the configuration of its Hugging Face model.
    """
    everyone = ranks.agree(
        lambda: (platform.node(), dict(_essentials(recipe, fingerprint))),
        lambda problems: UsageError("; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())),
        _HOST_AND_VALUES,
    )
    hosts, first = tuple(host for host, _ in everyone), everyone[0][1]
    for rank, (host, theirs) in enumerate(everyone):
        for key in first | theirs:
            if theirs.get(key) != first.get(key):
                raise MismatchError(
                    f"rank {rank} on {host} and rank 0 on {hosts[0]} have different {key}: {theirs.get(key)} against "
                    f"{first.get(key)}. {_remedy(key)}"
                )
    return hosts


def _essentials(recipe: Recipe, fingerprint: str) -> Iterator[tuple[str, str]]:
    installed = versions()
    for package in _PACKAGES:
        yield f"versions of {package}", installed[package]
    table = recipe.to_dict()
    for section in _SECTIONS:
        values: Mapping[str, Any] = table[section]
        for key, value in values.items():
            if f"{section}.{key}" not in _PLACES:
                yield f"{section}.{key}", repr(value)
    if (config := recipe.model.configuration) is not None:
        # Weights are not compared, as they take long to read: whether they are in files is.
        yield "initial weights", "from files" if recipe.model.starts_from_files else "at random"
        for key, value in computed_with(config).items():
            yield f"model.config.{key}", repr(value)
    yield "tokens", fingerprint


def _remedy(key: str) -> str:
    if key.startswith("versions"):
        return "Install the same on every host"
    if key == "tokens":
        return "Give every host the same text, tokenizer and data.* keys"
    return "Give every rank the same recipe and the same --set"

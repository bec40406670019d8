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
from thinwire.errors import MismatchError
from thinwire.spec.recipe import Recipe
from thinwire.train.launching.versions import versions

_HOST_AND_VALUES: Final[Typed[tuple[str, dict[str, str]]]] = Typed(tuple[str, dict[str, str]])

_SECTIONS: Final = ("train", "optimizer", "loss_scale", "checkpoint")
"""Sections of a recipe that must be equal. Paths of models and data may differ from host to host."""

_PACKAGES: Final = ("thinwire", "torch")
"""Packages whose versions must be equal, because they define the messages between ranks."""


def agree(ranks: Control, recipe: Recipe, fingerprint: str) -> tuple[str, ...]:
    """Compare software, recipe and tokens with the other ranks. Every rank calls it and gets the name of each rank's
    host, by rank.

    Raises:
        MismatchError: On every rank; names two ranks and their values.
    """
    mine = dict(_essentials(recipe, fingerprint))
    everyone = ranks.all_gather_typed((platform.node(), mine), _HOST_AND_VALUES)
    hosts = tuple(host for host, _ in everyone)
    for rank, (host, theirs) in enumerate(everyone):
        for key, expected in everyone[0][1].items():
            if theirs.get(key) != expected:
                raise MismatchError(
                    f"rank {rank} on {host} and rank 0 on {hosts[0]} have different {key}: {theirs.get(key)} against "
                    f"{expected}. {_remedy(key)}"
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
            yield f"{section}.{key}", repr(value)
    yield "tokens", fingerprint


def _remedy(key: str) -> str:
    if key.startswith("versions"):
        return "Install the same on every host"
    if key == "tokens":
        return "Give every host the same text, tokenizer and data.* keys"
    return "Give every rank the same recipe and the same --set"

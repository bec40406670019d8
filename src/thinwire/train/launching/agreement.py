"""What ranks must have in common, compared before any of them trains.

The plan and the shapes of the model are compared where the model is sharded. Here it is what else would let ranks drift
apart without a word, or wait for each other for ever: one that takes another learning rate, other tokens, or saves when
the others do not.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any, Final

from thinwire.collectives.group import Control
from thinwire.errors import MismatchError
from thinwire.spec.recipe import Recipe
from thinwire.train.launching.versions import versions

_SECTIONS: Final = ("train", "optimizer", "checkpoint")
"""Sections of a recipe that must be equal. Paths of models and data may differ from host to host."""

_PACKAGES: Final = ("thinwire", "torch")
"""Software whose versions must be equal: what ranks send each other is made by these."""


def agree(ranks: Control, recipe: Recipe, fingerprint: str) -> tuple[str, ...]:
    """Compare notes with the other ranks; all of them call this.

    Args:
        ranks: of the job.
        recipe: of the run.
        fingerprint: of the tokens.

    Returns:
        The name of every rank's host, by rank.

    Raises:
        MismatchError: on every rank, naming two ranks and what they have.
    """
    mine = dict(_essentials(recipe, fingerprint))
    everyone: list[tuple[str, Mapping[str, str]]] = ranks.all_gather_object((platform.node(), mine))
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

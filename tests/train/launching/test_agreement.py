"""Ranks with different software, recipes or tokens raise an error that names them before they train."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from thinwire.collectives.group import control
from thinwire.errors import MismatchError
from thinwire.spec.recipe import Recipe
from thinwire.testing.ranks import run_ranks
from thinwire.train.launching import agreement
from thinwire.train.launching.versions import versions

pytestmark = pytest.mark.ranks

RECIPE = {"model": {"layers": 1, "hidden": 16, "heads": 2}, "train": {"steps": 5}}


def refusal(what: str) -> str:
    """The message of a rank when rank 1 differs."""
    recipe, tokens = Recipe.parse(RECIPE), "x"
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            if what == "torch":
                patch.setattr(agreement, "versions", lambda: versions() | {"torch": "1.0"})
            if what == "recipe":
                recipe = recipe.with_(optimizer={"lr": 1.0})
            if what == "tokens":
                tokens = "y"
        try:
            hosts = agreement.agree(control(), recipe, tokens)
        except MismatchError as error:
            return str(error)
    assert len(hosts) == dist.get_world_size()
    return ""


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("nothing", ()),
        ("torch", ("rank 1 on ", "versions of torch: 1.0 against ", "Install the same on every host")),
        ("recipe", ("optimizer.lr: 1.0 against 0.0003", "the same recipe")),
        ("tokens", ("tokens: y against x", "the same text")),
    ],
)
def test_ranks_that_differ_in_versions_recipe_or_tokens_are_refused(what: str, parts: tuple[str, ...]) -> None:
    for message in run_ranks(4, refusal, what):
        assert all(part in message for part in parts), message
        assert bool(message) == bool(parts)

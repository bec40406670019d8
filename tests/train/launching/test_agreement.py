"""Ranks with different software, recipes or tokens raise an error that names them before they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from thinwire.collectives.group import control
from thinwire.errors import MismatchError, UsageError
from thinwire.spec.recipe import Recipe
from thinwire.testing.ranks import run_ranks
from thinwire.train.environment import versions
from thinwire.train.launching import agreement

pytestmark = pytest.mark.ranks

RECIPE = {"model": {"layers": 1, "hidden": 16, "heads": 2}, "train": {"steps": 5}}


CONFIG = {"model_type": "gpt2", "n_head": 2}


def refusal(what: str, here: Any = None) -> str:
    """The message of a rank when rank 1 differs: by what ``here`` says, if it is of the recipe."""
    recipe, tokens = Recipe.parse(RECIPE), "x"
    if what == "config":
        recipe = Recipe.parse(RECIPE | {"model": {"kind": "huggingface", "config": CONFIG}})
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            if what == "torch":
                patch.setattr(agreement, "versions", lambda: versions() | {"torch": "1.0"})
            if what == "recipe":
                recipe = recipe.with_(**here)
            if what == "config":
                recipe = recipe.with_(model=here)
            if what == "tokens":
                tokens = "y"
        try:
            hosts = agreement.agree(control(), recipe, tokens)
        except (MismatchError, UsageError) as error:
            return str(error)
    assert len(hosts) == dist.get_world_size()
    return ""


@pytest.mark.parametrize(
    ("what", "here", "parts"),
    [
        ("nothing", None, ()),
        ("torch", None, ("rank 1 on ", "versions of torch: 1.0 against ", "Install the same on every host")),
        ("recipe", {"optimizer": {"lr": 1.0}}, ("optimizer.lr: 1.0 against 0.0003", "the same recipe")),
        ("recipe", {"average": {"decay": 0.9}}, ("average.decay: 0.9 against None",)),
        ("recipe", {"publish": {"store": "/versions"}}, ("publish.store: '/versions' against None",)),
        ("recipe", {"model": {"norm_eps": 0.1}}, ("model.norm_eps: 0.1 against 1e-05",)),
        ("config", {"config": CONFIG | {"n_head": 4}}, ("model.config.n_head: 4 against 2",)),
        ("config", {"config": CONFIG | {"attn_pdrop": 0.0}}, ("model.config.attn_pdrop: 0.0 against None",)),
        ("config", {"config": CONFIG | {"use_cache": False}}, ()),
        ("config", {"config": "/absent.json"}, ("rank 1: /absent.json: 1 problem", "no such file")),
        ("tokens", None, ("tokens: y against x", "the same text")),
    ],
)
def test_ranks_that_differ_in_versions_recipe_or_tokens_are_refused(
    what: str, here: Any, parts: tuple[str, ...]
) -> None:
    for message in run_ranks(2, refusal, what, here):
        assert all(part in message for part in parts), message
        assert bool(message) == bool(parts)

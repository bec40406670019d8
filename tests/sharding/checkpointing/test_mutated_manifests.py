"""Manifests with a right checksum and wrong contents: a load succeeds or raises a CheckpointError, on every rank."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.checkpoint.manifest import MANIFEST_NAME, seal
from thinwire.errors import CheckpointError
from thinwire.sharding.checkpointing.saved_model import SavedModel
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**40, 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "0", "\ud800", "a\nb", [], [[]],
    [0], [1, 2], ["x"], {}, {"": 0}, {"x": []},
]  # fmt: skip
"""What takes the place of a part of a manifest."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutate(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Replace, remove, repeat or rename one to three parts."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        # Half of all changes are to values, which only their users can judge.
        inside = [path for path in places(body) if path[0] == "values" or chance.random() < 0.3]
        path = chance.choice(inside)
        parent: Any = body
        for step in path[:-1]:
            parent = parent[step]
        key, kind = path[-1], chance.random()
        if kind < 0.6:
            parent[key] = copy.deepcopy(chance.choice(JUNK))
        elif kind < 0.75:
            del parent[key]
        elif kind < 0.9 and isinstance(parent, dict):
            parent[chance.choice(["x", "", str(key) + "@0", str(key)[:-1]])] = parent.pop(key)
        elif isinstance(parent, list):
            parent.insert(chance.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
    return body


def start(seed: int) -> tuple[nn.Module, Any]:
    torch.default_generator.manual_seed(seed)
    wire = {"reduce_intra": "int8:64", "error_feedback": True, "spread": "int8:64", "spread_difference": True}
    frozen = {"storage": "int8:8"}
    plan = Plan.preset("zero1", nodes=1, local=2, compute_dtype="float16", wire=wire, frozen=frozen)
    still = nn.Linear(8, 8).requires_grad_(False)
    model = tw.shard(nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 8), still), plan)
    tw.average(model, decay=0.9)
    return model, tw.optimizer(model, torch.optim.AdamW, lr=0.1, loss_scale=tw.LossScale())


def check_mutations(directory: str, seed: int, count: int) -> dict[str, int]:
    path = Path(directory) / "c"
    model, optim = start(0)
    optim.loss_scale.scale(model(torch.randn(4, 8)).square().mean()).backward()
    optim.step()
    optim.zero_grad()
    tw.save(model, optim, path, extra={"position": {"step": 1}})
    manifest = path / MANIFEST_NAME
    sound = manifest.read_bytes()
    document = json.loads(sound)
    body, version = document["body"], document["version"]
    chance, options = random.Random(seed), [dict(group) for group in optim.param_groups]
    outcomes = {"loaded": 0, "refused": 0}
    for number in range(count):
        mutated = seal(mutate(body, chance), version)
        dist.barrier()
        if dist.get_rank() == 0:
            manifest.write_bytes(mutated)
        dist.barrier()
        try:
            tw.load(model, optim, path)
            outcomes["loaded"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {mutated!r}") from error
        for group, right in zip(optim.param_groups, options, strict=True):
            group.update(right)  # a learning rate of 7 is a learning rate, but not for the next load
        try:
            saved = SavedModel(path)
            for name in saved.shapes:
                saved.read(name)
        except CheckpointError:
            pass
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed}, read alone: {mutated!r}") from error
    dist.barrier()
    manifest.write_bytes(sound)
    dist.barrier()
    tw.load(model, optim, path)  # and nothing is left behind
    return outcomes


def campaign(tmp_path: Path, seed: int, count: int) -> None:
    (outcomes, other) = run_ranks(2, check_mutations, str(tmp_path), seed, count, timeout=1500)
    assert outcomes == other
    assert outcomes["refused"] > outcomes["loaded"] > 0


@pytest.mark.slow
def test_a_load_survives_any_contents_under_a_right_checksum(tmp_path: Path) -> None:
    campaign(tmp_path, 1, 80)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("seed", range(2, 7))
def test_a_load_survives_many_contents_under_a_right_checksum(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, seed, 1000)

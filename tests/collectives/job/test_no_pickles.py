"""Nothing between ranks is pickled: what is unpickled can run code."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.training.grids import batches, build, plan_for, start, train

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


@contextlib.contextmanager
def no_pickles() -> Iterator[None]:
    """Context in which torch's collectives of objects, and whatever pickles by itself, raise."""

    def refuse(*_args: Any, **_options: Any) -> NoReturn:
        raise AssertionError("an object was pickled")

    places = [(dist.distributed_c10d, "_object_to_tensor"), (dist.distributed_c10d, "_tensor_to_object")]
    places += [(pickle, name) for name in ("dumps", "loads", "Pickler", "Unpickler")]
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(mock.patch.object(module, name, refuse))
        yield


def use_shards(directory: Path) -> None:
    with no_pickles():
        model = tw.shard(build("llama"), tw.Plan.preset("zeropp", nodes=2, local=2, compute_dtype="float32"))
        optimizer = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        for (batch,) in batches(plan_for(1, 1, 1, micro_batches=1), 0):
            model(batch.input_ids, batch.labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        tw.save(model, optimizer, directory / "a", extra={"rank": [1]})
        tw.async_save(model, optimizer, directory / "b").result()
        tw.load(model, optimizer, directory / "a")
        tw.full_state_dict(model)
        with tw.full_parameters(model, write=True), torch.no_grad():
            next(model.parameters()).zero_()


def use_grid(directory: Path) -> None:
    with no_pickles():
        plan = plan_for(1, 2, 2)
        model, optimizer = start("llama", plan)
        train(model, optimizer, batches(plan, 0))
        model.save(optimizer, directory / "c")
        model.load(optimizer, directory / "c")


def test_ranks_of_a_sharded_model_exchange_none(tmp_path: Path) -> None:
    run_ranks(4, use_shards, tmp_path)


@pytest.mark.slow
def test_ranks_of_a_grid_exchange_none(tmp_path: Path) -> None:
    run_ranks(4, use_grid, tmp_path)


def use_objects() -> None:
    with no_pickles():
        dist.all_gather_object([None, None], "a")


def test_a_pickle_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="an object was pickled"):
        run_ranks(2, use_objects)

"""Lightning's ``Trainer`` trains with the strategy ``thinwire`` as with its own DDP."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.frameworks.lightning import STEPS, Blocks, loader, trainer
from tests.support.frameworks.stateful import PLANNED, assert_runs_alike, weights
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.testing import RankError, run_ranks


class TwoOptimizers(Blocks):
    """Has one optimizer for blocks and one for the head."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.blocks.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]


def train(strategy: Any, folder: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    model, world = Blocks(), dist.get_world_size()
    run = trainer(
        world, strategy, folder, accumulate_grad_batches=accumulate, gradient_clip_val=clip,
        val_check_interval=5 * accumulate, limit_val_batches=2,
    )  # fmt: skip
    run.fit(model, loader(world, STEPS, accumulate), loader(world, 2))
    record = {"losses": model.losses, "norms": model.norms, "validated": model.validated, "rates": model.rates}
    return record | {"weights": weights(model), "steps": run.global_step}


@pytest.mark.slow
@on_ranks(4)
def test_training_equals_ddp(tmp_path: Path) -> None:
    for accumulate, clip in itertools.product((1, 4), (None, 0.1)):
        reference = train("ddp", str(tmp_path), accumulate, clip)
        for name in PLANNED:
            result = train(name, str(tmp_path), accumulate, clip)
            assert result["steps"] == reference["steps"] == len(result["norms"]) == STEPS
            assert result["losses"][-1] != result["losses"][0]
            keys = ("losses", "norms", "validated", "rates")
            assert_runs_alike(result, reference, keys, f"{name}, accumulation {accumulate}, clip {clip}")


@pytest.mark.slow
@on_ranks(4)
def test_the_trainer_sends_what_a_loop_sends(tmp_path: Path) -> None:
    """Bytes of three steps through the trainer, and of the same steps in a loop of one's own."""
    model = Blocks()
    trainer(4, "thinwire", str(tmp_path)).fit(model, loader(4, 3))
    by_trainer = tw.traffic(model)
    own = Blocks()
    tw.shard(own, tw.Plan.preset("zero3", nodes=1, local=4, compute_dtype="float32"))
    optimizer = tw.optimizer(own, torch.optim.AdamW, lr=0.01)
    for x, y in loader(4, 3):
        optimizer.zero_grad()
        nn.functional.mse_loss(own(x), y).backward()
        tw.clip_grad_norm_(own, float("inf"))
        optimizer.step()
        if len(own.losses) == 2:
            break
        own.losses.append(0.0)
    by_hand = tw.traffic(own)
    for lane in ("gather", "reduce", "sync", "spread"):
        assert by_trainer[lane] == by_hand[lane], lane
    assert sum(by_hand["gather"].values()) > 0


def fit(kind: str, folder: str, options: dict[str, Any]) -> None:
    model = {"blocks": Blocks, "two": TwoOptimizers}[kind]()
    trainer(2, "thinwire", folder, **options).fit(model, loader(2, 2))


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("two", {}, "multiple optimizers is only supported with manual optimization"),
        ("blocks", {"precision": "16-true"}, "precision = '16-true'"),
        ("blocks", {"precision": "bf16-true"}, "precision = 'bf16-true'"),
    ],
)
def test_what_cannot_work_is_refused(kind: str, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=sentence):
        run_ranks(2, fit, kind, str(tmp_path), options)

"""Plans that were converted from DeepSpeed's JSON train, and lose what they should: stage by stage on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.convert import from_deepspeed, from_fsdp2
from thinwire.spec.factor import Factor
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.testing import run_ranks
from thinwire.train.data.packing import Dataset
from thinwire.train.data.tokens import TokenBin
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.trainer import Trainer

pytestmark = pytest.mark.ranks

RANKS = Factor(local=2, nodes=2)
STEPS = 3
SMALL = (
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.ffn=48", "model.vocab=50"),
    *("train.validate_every=0", "train.validation_samples=8", "train.tensorboard=false"),
)
CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_type": "linear"}},
}
ZEROPP = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}


def train(recipe: Path, directory: Path) -> list[float]:
    """Train one recipe on one rank; returns the loss of each step."""
    chosen = Recipe.read(recipe, SMALL)
    plan = PlanTemplate.read(chosen).resolve(RANKS)
    tokens = np.random.default_rng(0).integers(0, 50, 2000).astype(np.uint16)
    stream = TokenBin(path=directory / "t.bin", tokens=tokens, vocab=50)
    dataset = Dataset(stream, stream, 50, 3.9, "x", None)
    run = ResolvedRun(chosen, plan, RunDirectory(directory), node_ranks=RANKS.local)
    trainer = Trainer(run, dataset, torch.device("cpu"))
    records = [trainer.step(False)[0] for _ in range(STEPS)]
    return [record.loss for record in records if record is not None]


def losses(directory: Path, **changes: Any) -> list[float]:
    """Convert a configuration, train it, and return the losses of rank 0."""
    conversion = from_deepspeed({**CONFIG, **changes}, RANKS)
    directory.mkdir()
    recipe = directory / "recipe.toml"
    recipe.write_text(conversion.recipe_toml(model="llama-7b", steps=STEPS, seq=16))
    return run_ranks(4, train, recipe, directory)[0]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of stage 0, which are those of plain data parallelism."""
    return losses(tmp_path_factory.mktemp("converted") / "0")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_trains_like_stage_0(stage: int, exact: list[float], tmp_path: Path) -> None:
    assert len(exact) == STEPS
    assert exact[-1] < exact[0]
    assert losses(tmp_path / "run", zero_optimization={"stage": stage}) == pytest.approx(exact, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"mics_shard_size": 2}, ZEROPP], ids=["mics", "zeropp"])
def test_groups_and_codecs_train(keys: dict[str, Any], exact: list[float], tmp_path: Path) -> None:
    encoded = losses(tmp_path / "run", zero_optimization={"stage": 3, **keys})
    # INT4 gradients move the loss a little; MiCS is exact.
    assert encoded == pytest.approx(exact, rel=1e-5 if "mics_shard_size" in keys else 0.05)
    if keys is ZEROPP:
        assert encoded != pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
def test_fp16_with_its_loss_scale_trains(exact: list[float], tmp_path: Path) -> None:
    scaled = losses(tmp_path / "run", fp16={"enabled": True, "initial_scale_power": 8}, zero_optimization={"stage": 1})
    assert scaled == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
def test_an_fsdp2_plan_trains(exact: list[float], tmp_path: Path) -> None:
    from thinwire.spec.io import write_toml

    plan = from_fsdp2({"mesh": [2, 2], "reshard_after_forward": True}, RANKS).plan()
    plan.with_(micro_batch=2, micro_batches=2).save(tmp_path / "plan.toml")
    conversion = from_deepspeed(CONFIG, RANKS)
    text = conversion.recipe_toml(model="llama-7b", steps=STEPS, seq=16, plan_file="plan.toml")
    assert write_toml({"plan": "plan.toml"}).strip() in text
    (tmp_path / "recipe.toml").write_text(text)
    assert run_ranks(4, train, tmp_path / "recipe.toml", tmp_path)[0] == pytest.approx(exact, rel=1e-5)

"""Frozen parameters in checkpoints: kept once beside them, or only referred to; compared whenever they are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import grids
from torch import nn

import thinwire as tw
from thinwire.checkpoint.store import verify
from thinwire.collectives import group
from thinwire.errors import CheckpointError
from thinwire.sharding.checkpointing.saved_model import SavedModel
from thinwire.spec import Plan
from thinwire.testing import run_ranks
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

WIDTH, RANK = 192, 4
ADAPTERS = 2 * 3 * RANK * WIDTH * 4 * 3
"""Bytes of the adapters' masters and moments in fp32."""
BASE = 3 * WIDTH * WIDTH * 4
"""Bytes of the frozen matrices in fp32."""


class Adapted(nn.Module):
    """Frozen square layers, each with a low-rank adapter, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, RANK, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(RANK, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x


def start(preset: str, seed: int = 0, *, unfrozen: bool = False, dtype: str = "float32") -> tuple[nn.Module, Any]:
    torch.default_generator.manual_seed(seed)
    plain = Adapted()
    if unfrozen:
        plain.base[1].requires_grad_(True)
    ranks = group.control().size
    plan = Plan.preset(preset, nodes=2 if ranks > 1 else 1, local=max(1, ranks // 2), compute_dtype=dtype)
    model = tw.shard(plain, plan)
    return model, tw.optimizer(model, torch.optim.AdamW, lr=0.1)


def train(model: nn.Module, optim: Any, *steps: int) -> list[float]:
    """Steps on batches that all ranks share, so that losses do not depend on their number."""
    losses = []
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return tw.full_state_dict(model)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def write_run(directory: str, preset: str, frozen: str | None, seed: int = 0) -> list[float]:
    """Two checkpoints, and the losses after the second."""
    model, optim = start(preset, seed)
    train(model, optim, 0)
    tw.save(model, optim, Path(directory, "step-1"), frozen=frozen)
    train(model, optim, 1)
    tw.async_save(model, optim, Path(directory, "step-2"), extra={"step": 2}, frozen=frozen).result()
    return train(model, optim, 2, 3)


def resume_run(path: str, preset: str, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optim = start(preset, seed)
    assert tw.load(model, optim, path) == {"step": 2}
    loaded = weights(model)
    return train(model, optim, 2, 3), loaded


def fails(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def refused(path: str, preset: str, seed: int) -> str:
    """Why a checkpoint is not loaded, the same on all ranks; the model stays as it was."""
    model, optim = start(preset, seed)
    before = weights(model)
    message = fails(lambda: tw.load(model, optim, path))
    assert same(weights(model), before)
    return message


def one(results: Sequence[str]) -> str:
    (message,) = set(results)
    return message


@pytest.mark.parametrize("frozen", [None, "reference"])
def test_a_checkpoint_carries_what_is_trained(tmp_path: Path, frozen: str | None) -> None:
    run_ranks(4, write_run, str(tmp_path), "zero3", frozen)
    bases = list(tmp_path.glob("frozen-*"))
    for step in ("step-1", "step-2"):
        assert ADAPTERS < size(tmp_path / step) <= 1.05 * ADAPTERS + 100_000
        verify(tmp_path / step)
    saved = SavedModel(tmp_path / "step-2")
    torch.default_generator.manual_seed(0)
    initial = Adapted().state_dict()
    if frozen is None:
        assert size(bases[0]) > BASE
        assert len(bases) == 1
        assert torch.equal(saved.read("base.0.weight"), initial["base.0.weight"])
    else:
        assert not bases
        assert "base.0.weight is stored nowhere" in fails(lambda: saved.read("base.0.weight"))
    assert not torch.equal(saved.read("up.0.weight"), initial["up.0.weight"])


@pytest.mark.parametrize(("frozen", "seed"), [(None, 5), ("reference", 0)])
def test_a_run_goes_on_bit_for_bit_under_another_plan_and_number_of_ranks(
    tmp_path: Path, frozen: str | None, seed: int
) -> None:
    losses = run_ranks(4, write_run, str(tmp_path), "zero3", frozen)[0]
    states = []
    for ranks, preset in ((4, "zero3"), (2, "zero1"), (1, "zero3")):
        again, loaded = run_ranks(ranks, resume_run, str(tmp_path / "step-2"), preset, seed)[0]
        assert again == losses
        states.append(loaded)
    assert same(states[0], states[1])
    assert same(states[0], states[2])


def test_a_wrong_model_under_a_reference_is_named(tmp_path: Path) -> None:
    run_ranks(2, write_run, str(tmp_path), "zero1", "reference")
    path = tmp_path / "step-2"
    assert one(run_ranks(2, refused, str(path), "zero1", 1)) == (
        f"{path} refers to frozen parameters that were saved nowhere, and this model is another: its base.0.bias has "
        "other values; load the model from the files that the run began with, before thinwire.shard, under a "
        "plan with the run's compute_dtype and frozen.storage"
    )


def test_a_missing_base_is_named_and_where_it_was_looked_for(tmp_path: Path) -> None:
    """A checkpoint copied elsewhere says what it lacks; with its base beside, or under other paths, it is whole."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    losses = run_ranks(2, write_run, str(run), "zero1", None)[0]
    (base,) = run.glob("frozen-*")
    copy = shutil.copytree(run / "step-2", elsewhere / "copied" / "step-2")
    sentence = (
        f"{copy}: the frozen parameters that it refers to are not there: no {base.name} in {copy.parent}; put that "
        "directory, or a link to it, next to the checkpoint"
    )
    assert one(run_ranks(2, refused, str(copy), "zero1", 5)) == sentence
    assert fails(lambda: verify(copy)) == fails(lambda: SavedModel(copy)) == sentence

    other = tmp_path / "other"
    run_ranks(2, write_run, str(other), "zero1", None, 9)
    (wrong,) = other.glob("frozen-*")
    shutil.copytree(wrong, copy.parent / wrong.name)
    assert f"({wrong.name} is another: its base.0.bias has other values)" in fails(lambda: verify(copy))
    shutil.copytree(base, copy.parent / base.name)
    assert run_ranks(1, resume_run, str(copy), "zero3", 5)[0][0] == losses

    (base / next(base.glob("*.safetensors")).name).unlink()
    assert "missing; the checkpoint is incomplete" in fails(lambda: verify(run / "step-2"))


def unfreeze(directory: str, path: str, seed: int) -> None:
    """A layer that was frozen is trained from the values that it had; what stays frozen is not written again."""
    before, _ = start("zero1", seed)
    tw.load(before, None, path)
    model, optim = start("zero1", seed, unfrozen=True)
    tw.load(model, None, path)
    assert same(weights(model), weights(before))
    train(model, optim, 2)
    tw.save(model, optim, Path(directory, "step-3"))
    again, resumed = start("zero3", seed + 1, unfrozen=True)
    tw.load(again, resumed, Path(directory, "step-3"))
    assert same(weights(again), weights(model))
    assert train(again, resumed, 3, 4) == train(model, optim, 3, 4)


@pytest.mark.parametrize(("frozen", "seed"), [(None, 5), ("reference", 0)])
def test_a_layer_is_unfrozen_later(tmp_path: Path, frozen: str | None, seed: int) -> None:
    run_ranks(2, write_run, str(tmp_path), "zero1", frozen)
    run_ranks(2, unfreeze, str(tmp_path), str(tmp_path / "step-2"), seed)
    assert len(list(tmp_path.glob("frozen-*"))) == 1


def freeze_again(directory: str) -> None:
    """A layer that was trained is frozen by the next run, which keeps its new values in another base."""
    model, optim = start("zero1", unfrozen=True)
    train(model, optim, 0)
    tw.save(model, optim, Path(directory, "step-1"))
    frozen, _ = start("zero1", 1)
    tw.load(frozen, None, Path(directory, "step-1"))
    tw.save(frozen, None, Path(directory, "step-2"))
    again, _ = start("zero3", 2)
    tw.load(again, None, Path(directory, "step-2"))
    assert same(weights(again), weights(model))


def test_a_layer_is_frozen_later(tmp_path: Path) -> None:
    run_ranks(2, freeze_again, str(tmp_path))
    assert len(list(tmp_path.glob("frozen-*"))) == 2


def change_values(directory: str) -> None:
    """Frozen values that change are never taken for those of the base, however they are written."""
    model, optim = start("zero3")
    names = [name for name, _ in model.named_parameters() if name.startswith("base") and name.endswith("weight")]

    def by_operation() -> None:
        with torch.no_grad():
            model.get_parameter(names[0]).add_(1)

    def by_data() -> None:
        model.get_parameter(names[1]).data.mul_(2)

    def gathered() -> None:
        with tw.full_parameters(model, write=True):
            for parameter in model.base[2].parameters():
                parameter.zero_()

    def by_load() -> None:
        tw.load(model, optim, Path(directory, "step-0"))

    tw.save(model, optim, Path(directory, "step-0"))
    for step, change in enumerate((by_operation, by_data, gathered, by_load), 1):
        before = weights(model)
        change()
        assert not same(weights(model), before)
        tw.async_save(model, optim, Path(directory, f"step-{step}")).result()
        again, resumed = start("zero1", 3)
        tw.load(again, resumed, Path(directory, f"step-{step}"))
        assert same(weights(again), weights(model))


def test_changed_values_go_to_another_base(tmp_path: Path) -> None:
    run_ranks(2, change_values, str(tmp_path))
    assert len(list(tmp_path.glob("frozen-*"))) == 4


def lose_the_base(directory: str) -> list[str]:
    """A base that is gone fails one save, or is found in another place; the next save writes it again."""
    model, optim = start("zero1")
    place = Path(directory, "bases")
    tw.save(model, optim, Path(directory, "a"), frozen=place)
    group.control().barrier()
    if group.control().rank == 0:
        shutil.rmtree(place)
    group.control().barrier()
    messages = [
        fails(lambda: tw.save(model, optim, Path(directory, "b"), frozen=place)),
        fails(lambda: tw.load(model, optim, Path(directory, "a"))),
    ]
    tw.async_save(model, optim, Path(directory, "b"), frozen=place).result()
    for name in ("a", "b"):
        tw.load(model, optim, Path(directory, name))
    return messages


def test_a_base_that_is_gone_is_written_again(tmp_path: Path) -> None:
    messages = run_ranks(2, lose_the_base, str(tmp_path))
    assert messages[0] == messages[1]
    gone, missing = messages[0]
    assert "which held the frozen parameters, is gone; the next save writes it again" in gone
    assert f"in {tmp_path / 'bases'} or {tmp_path}" in missing


def save_in_bfloat16(directory: str) -> None:
    """Frozen parameters keep their own dtype, and load into another one."""
    model, optim = start("zero3", dtype="bfloat16")
    tw.save(model, optim, Path(directory, "step-1"))
    wide, _ = start("zero1", 1)
    tw.load(wide, None, Path(directory, "step-1"))
    for name, value in weights(model).items():
        assert torch.equal(weights(wide)[name], value.float()), name


def test_another_dtype(tmp_path: Path) -> None:
    run_ranks(2, save_in_bfloat16, str(tmp_path))
    (base,) = tmp_path.glob("frozen-*")
    assert BASE / 2 < size(base) < BASE


def start_on_a_grid(plan: Plan, seed: int) -> tuple[Any, Any]:
    """Attention is frozen, half of which tensor parallelism cuts, and so are the embedding and the head."""
    torch.default_generator.manual_seed(seed)
    model = grids.build("llama")
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.add_(seed * 1e-3)
        parameter.requires_grad_("mlp" in name or "norm" in name)
    parallel = tw.parallelize(model, plan, loss=cross_entropy)
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=grids.LR, eps=grids.EPS)


def save_on_a_grid(plan: Plan, path: Path) -> list[float]:
    model, optimizer = start_on_a_grid(plan, 0)
    steps = grids.batches(plan, model.grid.data)
    grids.train(model, optimizer, steps[:1])
    model.save(optimizer, path)
    return grids.train(model, optimizer, steps[1:])[0]


def load_on_a_grid(plan: Plan, path: Path) -> list[float]:
    model, optimizer = start_on_a_grid(plan, 1)
    model.load(optimizer, path)
    model.save(optimizer, path.with_name("again"))
    return grids.train(model, optimizer, grids.batches(plan, model.grid.data)[1:])[0]


def refer_on_a_grid(directory: str) -> str:
    """Save a model that tensor parallelism cuts, without its frozen slices; returns why a wrong base is not loaded."""
    plan = grids.plan_for(1, 2, 1)
    model, optimizer = start_on_a_grid(plan, 0)
    grids.train(model, optimizer, grids.batches(plan, model.grid.data)[:1])
    before = grids.whole_parameters(model)
    model.save(optimizer, Path(directory, "now"), frozen="reference")
    model.async_save(optimizer, Path(directory, "later"), frozen="reference").result()
    assert not list(Path(directory).glob("frozen-*"))
    assert size(Path(directory, "now")) < sum(value.numel() for value in before.values()) * 12
    for name in ("now", "later"):
        same_base, _ = start_on_a_grid(plan, 0)
        same_base.load(None, Path(directory, name))
        assert same(grids.whole_parameters(same_base), before)
    wrong, _ = start_on_a_grid(plan, 1)
    return fails(lambda: wrong.load(None, Path(directory, "now")))


def test_a_grid_refers_to_its_base(tmp_path: Path) -> None:
    assert "embed_tokens.weight" in one(run_ranks(2, refer_on_a_grid, str(tmp_path)))


@pytest.mark.slow
def test_frozen_parameters_load_on_any_grid(tmp_path: Path) -> None:
    saving = grids.plan_for(1, 2, 2)
    losses = run_ranks(4, save_on_a_grid, saving, tmp_path / "grid")[0]
    assert len(list(tmp_path.glob("frozen-*"))) == 1
    for plan in (grids.plan_for(2, 1, 1, micro_batches=2), grids.plan_for(1, 1, 2), saving):
        again = run_ranks(plan.ranks, load_on_a_grid, plan, tmp_path / "grid")[0]
        torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=2e-6, atol=0)
        verify(tmp_path / "again")
    assert len(list(tmp_path.glob("frozen-*"))) == 2  # one in slices, one whole

"""Fabric over thinwire: what its own DDP computes, in the same loop; checkpoints for other numbers of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from tests.support.frameworks.fabric import (
    STEPS,
    WIDTH,
    Blocks,
    fabric_of,
    loop,
    micro_batches,
    parts,
)
from tests.support.frameworks.stateful import PLANNED, Counter, assert_runs_alike, weights
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import SpecError, UsageError
from thinwire.integrations.fabric import ThinwireFabricStrategy
from thinwire.testing import run_ranks


@pytest.mark.slow
@on_ranks(4)
def test_training_equals_ddp() -> None:
    for accumulate, clip in itertools.product((1, 4), (None, 0.1)):
        results = {}
        for name in ("ddp", *PLANNED):
            fabric = fabric_of(4, name)
            made = parts(fabric)
            result = loop(fabric, made, accumulate, clip, range(STEPS))
            results[name] = {**result, "weights": weights(made[0].module)}
        reference = results.pop("ddp")
        for name, result in results.items():
            assert len(result["losses"]) >= STEPS
            assert result["losses"][-1] != result["losses"][0]
            keys = ("losses", "norms", "evaluated", "rates")
            assert_runs_alike(result, reference, keys, f"{name}, accumulation {accumulate}, clip {clip}")


def save_midway(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Save after half of the steps; return the later losses and the last weights."""
    fabric = fabric_of(4, "thinwire")
    made = parts(fabric)
    counter = Counter()
    loop(fabric, made, 2, 1.0, range(STEPS // 2))
    counter.count = 7
    model, optimizer, scheduler = made
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": counter, "step": STEPS // 2}
    fabric.save(f"{folder}/half", state | {"note": ("a", 1.5)})
    later = loop(fabric, made, 2, 1.0, range(STEPS // 2, STEPS))
    return later["losses"], weights(model.module)


def resume(folder: str) -> tuple[list[float], dict[str, torch.Tensor], int, dict[str, Any]]:
    fabric = fabric_of(2, ThinwireFabricStrategy("zero1"))
    made = parts(fabric)
    model, optimizer, scheduler = made
    counter = Counter()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": counter, "step": 0}
    rest = fabric.load(f"{folder}/half", state)
    with pytest.raises(KeyError, match="has no 'epoch'; beside modules and optimizers it has "):
        fabric.load(f"{folder}/half", state | {"epoch": 0})
    fabric.load(f"{folder}/half", state | {"epoch": 0}, strict=False)
    later = loop(fabric, made, 2, 1.0, range(state["step"], STEPS))
    return later["losses"], weights(model.module), counter.count, rest


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_resumes_on_two(tmp_path: Path) -> None:
    later, final = run_ranks(4, save_midway, str(tmp_path))[0]
    losses, resumed, count, rest = run_ranks(2, resume, str(tmp_path))[0]
    assert (count, rest) == (7, {"note": ("a", 1.5)})
    assert losses == pytest.approx(later, rel=1e-5)
    torch.testing.assert_close(resumed, final, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on_ranks(4)
def test_fabric_sends_what_a_loop_sends() -> None:
    """Bytes of three steps through Fabric, and of the same steps in a loop of one's own."""
    fabric = fabric_of(4, "thinwire")
    made = parts(fabric)
    loop(fabric, made, 1, 1.0, range(3))
    own = tw.shard(Blocks(), tw.Plan.preset("zero3", nodes=1, local=4, compute_dtype="float32"))
    optimizer = tw.optimizer(own, torch.optim.AdamW, lr=0.01)
    for ((x, y),) in micro_batches(fabric, 1, range(3)):
        nn.functional.mse_loss(own(x), y).backward()
        tw.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sent, wanted = tw.traffic(made[0].module), tw.traffic(own)
    for lane in ("reduce", "sync", "spread"):
        assert sent[lane] == wanted[lane], lane
    assert sum(wanted["reduce"].values()) > 0


@pytest.mark.slow
@on_ranks(2)
def test_what_cannot_work_is_one_sentence() -> None:
    def refused(pattern: str) -> Any:
        return pytest.raises((UsageError, SpecError), match=pattern)

    with refused("precision = '64-true'"):
        fabric_of(2, "thinwire", precision="64-true")
    fabric = fabric_of(2, "thinwire")
    model, other = Blocks(), Blocks()
    with refused("parameters of SGD are not parameters"):
        fabric.setup(model, torch.optim.SGD(other.parameters(), 0.1))
    module = fabric.setup_module(Blocks())
    with refused(r"fabric.setup_optimizers\(SGD\)"):
        fabric.setup_optimizers(torch.optim.SGD(other.parameters(), 0.1))
    with refused("has no sharded module"):
        fabric.save("nowhere", {"step": 3})
    with refused("filter: the strategy"):
        fabric.save("nowhere", {"model": module}, filter={"model": lambda *_: True})


def adversaries(fabric: Fabric, folder: str) -> list[torch.Tensor]:
    """A generator and a discriminator, each a module; the discriminator has two optimizers. Saved and loaded midway."""
    generator, critic = Blocks(), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    made, of_made = fabric.setup(generator, torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999)))
    halves = [torch.optim.SGD(critic[0].parameters(), 0.1, momentum=0.9), torch.optim.SGD(critic[2].parameters(), 0.2)]
    judge, first, second = fabric.setup(critic, *halves)
    state = {"generator": made, "judge": judge, "of_made": of_made, "first": first, "second": second, "step": 3}

    def train(steps: Sequence[int]) -> None:
        for step in steps:
            x, y = torch.randn(2, 8, WIDTH), torch.randn(8, 4)
            outputs = made(x[0])
            losses = nn.functional.softplus(-judge(y)), nn.functional.softplus(judge(outputs.detach()))
            fabric.backward(losses[0].mean() + losses[1].mean())
            fabric.clip_gradients(judge, first, clip_val=1e-2)
            for optimizer in (first, second):
                optimizer.step()
            fabric.backward(nn.functional.softplus(-judge(outputs)).mean() / (step + 1))
            fabric.clip_gradients(made, of_made, clip_val=1e-2)
            of_made.step()
            for optimizer in (first, second, of_made):
                optimizer.zero_grad()

    torch.manual_seed(fabric.global_rank)
    train(range(3))
    fabric.save(folder, state)
    position = torch.get_rng_state()
    train(range(3))
    state["step"] = 0
    fabric.load(folder, state)
    assert state["step"] == 3
    torch.set_rng_state(position)
    train(range(2))
    return [value for model in (generator, critic) for value in weights(model).values()]


@on_ranks(2)
def test_several_modules_and_optimizers_equal_ddp(tmp_path: Path) -> None:
    folder = str(tmp_path)
    expected = adversaries(fabric_of(2, DDPStrategy(find_unused_parameters=True)), f"{folder}/ddp")
    for name in ("thinwire", "thinwire_zero1"):
        assert all(map(torch.equal, adversaries(fabric_of(2, name), f"{folder}/{name}"), expected)), name


@on_ranks(2)
def test_ranks_keep_the_first_ones_statistics() -> None:
    fabric, module = fabric_of(2, "thinwire"), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    torch.manual_seed(fabric.global_rank)
    fabric.backward(model(torch.randn(3, 4)).square().mean())
    optimizer.step()
    first, second = fabric.all_gather(module[1].running_mean)
    assert torch.equal(first, second)
    assert first.any()


def optimizer_of(model: Blocks, part: bool) -> torch.optim.Optimizer:
    """An optimizer of a part of a model, or of all of it in two groups."""
    if part:
        return torch.optim.Adam(model.blocks.parameters(), 0.03)
    groups = [{"params": model.head.parameters(), "lr": 0.02}, {"params": [*model.blocks.parameters()][::-1]}]
    return torch.optim.AdamW(groups, 0.01)


def resumed_from_files(fabric: Fabric, folder: Path, part: bool) -> list[torch.Tensor]:
    """Weights after steps that go on from files of torch's own."""
    model = Blocks()
    module, optimizer = fabric.setup(model, optimizer_of(model, part))
    fabric.load_raw(folder / "model.pt", module)
    fabric.load_raw(folder / "optimizer.pt", optimizer)
    for ((x, y),) in micro_batches(fabric, 1, range(2)):
        fabric.backward(nn.functional.mse_loss(module(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return list(weights(module.module).values())


@on_ranks(2)
def test_files_of_torch_resume_as_under_ddp(tmp_path: Path) -> None:
    for part in (False, True):
        folder = tmp_path / f"{torch.distributed.get_rank()}-{part}"
        folder.mkdir()
        model = Blocks()
        optimizer = optimizer_of(model, part)
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5))).square().mean().backward()
        optimizer.step()
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        expected = resumed_from_files(fabric_of(2, "ddp"), folder, part)
        for name in ("thinwire", "thinwire_zero1"):
            assert all(map(torch.equal, resumed_from_files(fabric_of(2, name), folder, part), expected)), (name, part)


@on_ranks(2)
def test_a_checkpoint_may_lack_the_optimizer(tmp_path: Path) -> None:
    for name in ("ddp", "thinwire"):
        fabric, model, path = fabric_of(2, name), Blocks(), tmp_path / name
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        fabric.save(path, {"model": module, "step": 3})
        saved = weights(module.module)
        fabric.backward(module(torch.ones(1, WIDTH)).sum())
        optimizer.step()
        state = {"model": module, "optimizer": optimizer, "step": 0}
        with pytest.raises(KeyError, match="optimizer"):
            fabric.load(path, state)
        assert not any(map(torch.equal, weights(module.module).values(), saved.values()))
        assert fabric.load(path, state, strict=False) == {}
        assert all(map(torch.equal, weights(module.module).values(), saved.values()))
        assert state["step"] == 3

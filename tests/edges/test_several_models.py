"""Programs that train several models, or one model by several optimizers, equal DDP to the last digit in float32."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.testing import RankError, run_ranks

pytestmark = pytest.mark.ranks

PLANS = ("zero3", "zero1")


class Net(nn.Module):
    """A few residual blocks."""

    def __init__(self, inputs: int = 8, outputs: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Pair(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Net(), Net(outputs=1)

    def forward(self, x: torch.Tensor, *, generates: bool = True) -> torch.Tensor:
        return self.discriminator(self.generator(x) if generates else x)


class Side:
    """One of the two libraries that run a program; records losses.

    Args:
        optimizers: ``"ddp"``, or whose optimizers thinwire's side has: ``"torch"`` or ``"thinwire"``.
        plans: Plans of the first and the second model.
    """

    def __init__(self, optimizers: str, plans: Sequence[str] = PLANS) -> None:
        self.optimizers, self.plans, self.losses = optimizers, plans, []
        self.is_ddp = optimizers == "ddp"

    def plain(self, seed: int, **sizes: int) -> Net:
        torch.manual_seed(seed)
        return Net(**sizes)

    def shard(self, model: Any, which: int = 0) -> Any:
        if self.is_ddp:
            return DistributedDataParallel(model, find_unused_parameters=isinstance(model, Pair))
        return tw.shard(model, tw.Plan.preset(self.plans[which], nodes=1, local=2, compute_dtype="float32"))

    def two(self) -> tuple[Any, Any]:
        return self.shard(self.plain(1), 0), self.shard(self.plain(2), 1)

    def optimizer(self, model: nn.Module) -> Any:
        if self.optimizers == "thinwire":
            return tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def inside(self, model: Any) -> Any:
        return model.module if self.is_ddp else model

    def batch(self, step: int, key: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * key + dist.get_rank())
        return torch.randn(4, 8, generator=generator)

    def micro_batches(self, models: Sequence[Any], step: int, count: int) -> Iterator[torch.Tensor]:
        batches = [self.batch(step, key) for key in range(count)]
        if not self.is_ddp:
            yield from tw.micro_batches(models, batches)
            return
        for number, batch in enumerate(batches):
            with contextlib.ExitStack() as stack:
                for model in models if number + 1 < count else ():
                    stack.enter_context(model.no_sync())
                yield batch

    def update(self, loss: torch.Tensor, *optimizers: Any) -> None:
        loss.backward()
        self.losses.append(loss.detach().clone())
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def wholes(self, *models: Any) -> list[torch.Tensor]:
        states = [model.module.state_dict() if self.is_ddp else tw.full_state_dict(model) for model in models]
        return [value.clone() for state in states for value in state.values()]


def real(logits: torch.Tensor) -> torch.Tensor:
    return functional.softplus(-logits).mean()


def fake(logits: torch.Tensor) -> torch.Tensor:
    return functional.softplus(logits).mean()


def one_backward_of_summed_losses(side: Side, _: str) -> list[torch.Tensor]:
    """An actor under zero3, a critic under zero1, and a teacher that is whole and frozen, on shared batches."""
    (actor, critic), teacher = side.two(), side.plain(3).requires_grad_(False)
    optimizers = side.optimizer(actor), side.optimizer(critic)
    for step in range(4):
        x = side.batch(step)
        target = teacher(x)
        side.update(functional.mse_loss(actor(x), target) + functional.l1_loss(critic(x), target), *optimizers)
    return side.wholes(actor, critic)


def adversaries_of_one_forward(side: Side, _: str) -> list[torch.Tensor]:
    """The discriminator steps while the generator's forward is in flight, and is frozen for the generator's step."""
    generator, discriminator = side.two()
    of_generator, of_discriminator = side.optimizer(generator), side.optimizer(discriminator)
    for step in range(4):
        made = generator(side.batch(step, 9))
        side.update(real(discriminator(side.batch(step))) + fake(discriminator(made.detach())), of_discriminator)
        for parameter in discriminator.parameters():
            parameter.requires_grad_(False)
        side.update(real(discriminator(made)), of_generator)
        for parameter in discriminator.parameters():
            parameter.requires_grad_(True)
    return side.wholes(generator, discriminator)


def cycle(side: Side, _: str) -> list[torch.Tensor]:
    """Each model's outputs are the other's inputs."""
    there, back = side.two()
    optimizers = side.optimizer(there), side.optimizer(back)
    for step in range(3):
        x, y = side.batch(step), side.batch(step, 1)
        side.update(functional.l1_loss(back(there(x)), x) + functional.l1_loss(there(back(y)), y), *optimizers)
    return side.wholes(there, back)


def critic_with_slow_targets(side: Side, _: str) -> list[torch.Tensor]:
    """Targets follow both models; the actor learns through the critic."""
    actor, critic = side.two()
    slow = [copy.deepcopy(side.inside(model)).requires_grad_(False) for model in (actor, critic)]
    of_actor, of_critic = side.optimizer(actor), side.optimizer(critic)
    for step in range(4):
        x = side.batch(step)
        with torch.no_grad():
            target = 0.9 * slow[1](slow[0](side.batch(step, 1))) + 0.1
        side.update(functional.mse_loss(critic(x), target), of_critic)
        critic.requires_grad_(False)
        side.update(-critic(actor(x)).mean(), of_actor)
        critic.requires_grad_(True)
        with torch.no_grad():
            for target_model, model in zip(slow, (actor, critic), strict=True):
                for old, new in zip(target_model.parameters(), side.inside(model).parameters(), strict=True):
                    old.lerp_(new, 0.1)
    return side.wholes(actor, critic)


def average_under_another_plan(side: Side, _: str) -> list[torch.Tensor]:
    model, average = side.shard(side.plain(1)), side.plain(1).requires_grad_(False)
    average = average if side.is_ddp else side.shard(average, 1)
    optimizer = side.optimizer(model)
    for step in range(3):
        side.update(model(side.batch(step)).square().mean(), optimizer)
        with torch.no_grad():
            for old, new in zip(average.parameters(), side.inside(model).parameters(), strict=True):
                old.lerp_(new, 0.1)
        side.losses.append(average(side.batch(step)))
    return side.wholes(model)


def common_micro_batches(side: Side, _: str) -> list[torch.Tensor]:
    """Both models accumulate gradients over the same micro-batches."""
    models = side.two()
    optimizers = [side.optimizer(model) for model in models]
    for step in range(3):
        for x in side.micro_batches(models, step, 3):
            side.update((models[0](x).square().mean() + models[1](x).abs().mean()) / 3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return side.wholes(*models)


def one_ends_before_the_other(side: Side, _: str) -> list[torch.Tensor]:
    """Rank 0 has two batches and rank 1 three, and both models count only real ones."""
    models = side.two()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    mine = 2 + dist.get_rank()
    batches = [side.batch(step) for step in range(3 if side.is_ddp else mine)]
    for step, x in enumerate(batches if side.is_ddp else tw.join(models, batches)):
        counts = float(not side.is_ddp or step < mine)
        ((models[0](x).square().mean() + models[1](x).square().mean()) * counts).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return side.wholes(*models)


def saved_in_one_folder(side: Side, folder: str) -> list[torch.Tensor]:
    """Both are saved beside each other, go astray, and go on from there, each by itself."""
    models = side.two()
    optimizers = [side.optimizer(model) for model in models]

    def train(steps: Sequence[int]) -> None:
        for step in steps:
            side.update(models[1](models[0](side.batch(step))).square().mean(), *optimizers)

    train(range(2))
    if not side.is_ddp:
        for name, model, optimizer in zip(("actor", "critic"), models, optimizers, strict=True):
            tw.async_save(model, optimizer, Path(folder, name))
        train(range(5, 7))
        for name, model, optimizer in zip(("actor", "critic"), models, optimizers, strict=True):
            tw.load(model, optimizer, Path(folder, name))
        side.losses = side.losses[:2]
    train(range(2, 4))
    return side.wholes(*models)


def one_optimizer_of_both(side: Side, folder: str) -> list[torch.Tensor]:
    """One optimizer for both models, saved with each of them."""
    models = side.two()

    def made() -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for model in models for parameter in model.parameters()], lr=1e-2)

    optimizer = made()
    for step in range(4):
        if step == 2 and not side.is_ddp:
            for name, model in zip(("first", "second"), models, strict=True):
                tw.save(model, optimizer, Path(folder, name))
            models = side.two()
            optimizer = made()
            for name, model in zip(("first", "second"), models, strict=True):
                tw.load(model, optimizer, Path(folder, name))
        side.update(models[1](models[0](side.batch(step))).square().mean(), optimizer)
    return side.wholes(*models)


def _parts(side: Side) -> tuple[Any, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    pair = side.shard(Pair())
    inside = side.inside(pair)
    # Momentum without Adam's counts for one, so that states differ in what they hold.
    return pair, [
        torch.optim.AdamW(inside.generator.parameters(), lr=1e-2),
        torch.optim.SGD(inside.discriminator.parameters(), lr=1e-2, momentum=0.9),
    ]


def two_optimizers_of_one_model(side: Side, folder: str) -> list[torch.Tensor]:
    """Each updates a part, by turns or together, clipped by itself; a new model goes on from a checkpoint."""
    pair, (of_generator, of_discriminator) = _parts(side)
    for step in range(4):
        if step == 2 and not side.is_ddp:
            tw.save(pair, (of_generator, of_discriminator), folder)
            side.plans = side.plans[::-1]
            pair, (of_generator, of_discriminator) = _parts(side)
            tw.load(pair, (of_generator, of_discriminator), folder)
        inside = side.inside(pair)
        side.update(real(pair(side.batch(step))))
        nn.utils.clip_grad_value_(inside.generator.parameters(), 1e-2)
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        with torch.no_grad():
            made = inside.generator(side.batch(step))
        side.update(fake(pair(made, generates=False)))
        nn.utils.clip_grad_norm_(inside.discriminator.parameters(), 1e-2)
        of_discriminator.step()
        pair.zero_grad()
        side.update(pair(side.batch(step, 3)).square().mean(), of_generator, of_discriminator)
    return side.wholes(pair)


Program = Callable[[Side, str], list[torch.Tensor]]

WITH_BOTH_KINDS: tuple[Program, ...] = (
    one_backward_of_summed_losses,
    adversaries_of_one_forward,
    cycle,
    critic_with_slow_targets,
    average_under_another_plan,
    saved_in_one_folder,
)
"""Programs that run with torch's optimizers and with thinwire's."""

PROGRAMS: dict[Program, tuple[str, ...]] = {
    **dict.fromkeys(WITH_BOTH_KINDS, ("torch", "thinwire")),
    one_ends_before_the_other: ("torch",),
    one_optimizer_of_both: ("torch",),
    two_optimizers_of_one_model: ("torch",),
}


def differences(program: Program, sides: Sequence[tuple[str, Sequence[str]]], folder: str) -> list[str]:
    """The sides of thinwire on which a program does not end with DDP's losses and parameters, bit for bit."""
    reference = Side("ddp")
    expected = program(reference, folder)
    unequal = []
    for optimizers, plans in sides:
        side = Side(optimizers, plans)
        got = program(side, folder)
        pairs = zip([*expected, *reference.losses], [*got, *side.losses], strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            unequal.append(f"{optimizers} under {plans}")
    return unequal


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_several_models_equal_ddp(program: Program, tmp_path: Path) -> None:
    sides = [(optimizers, plans) for optimizers in PROGRAMS[program] for plans in (PLANS, PLANS[::-1])]
    assert run_ranks(2, differences, program, sides, str(tmp_path)) == [[], []]


def test_common_micro_batches_equal_ddp(tmp_path: Path) -> None:
    # Under sharded gradients, ranks combine each micro-batch's gradient, so that sums have another order.
    sides = [("torch", ("zero1", "zero1")), ("thinwire", ("zero1", "ddp"))]
    assert run_ranks(2, differences, common_micro_batches, sides, str(tmp_path)) == [[], []]


@on_ranks(2)
def test_checkpoints_fit_both_kinds_of_optimizers(tmp_path: Path) -> None:
    """A checkpoint of torch's optimizer is one of thinwire's, and the other way round."""
    folder = str(tmp_path)
    side = Side("torch")

    def trained(start: Any, end: Any) -> list[torch.Tensor]:
        model = side.shard(side.plain(1))
        optimizer = start(model)
        side.update(model(side.batch(0)).square().mean(), optimizer)
        tw.save(model, optimizer, folder)
        model = side.shard(side.plain(2), 1)
        optimizer = end(model)
        tw.load(model, optimizer, folder)
        side.update(model(side.batch(1)).square().mean(), optimizer)
        return side.wholes(model)

    kinds = side.optimizer, Side("thinwire").optimizer
    expected = trained(kinds[0], kinds[0])
    for start, end in (kinds, kinds[::-1], (kinds[1],) * 2):
        assert all(map(torch.equal, trained(start, end), expected))


def second_of_thinwire(_: str) -> None:
    side = Side("thinwire")
    model = side.shard(side.plain(1))
    first, _ = side.optimizer(model), side.optimizer(model)
    model(side.batch(0)).square().mean().backward()
    first.step()


def common_part(_: str) -> None:
    side = Side("torch")
    body = side.plain(1)
    side.shard(nn.Sequential(body, nn.Linear(8, 1)))
    side.shard(nn.Sequential(body, nn.Linear(8, 4)))


def history(folder: str) -> None:
    side = Side("torch")
    model = side.shard(side.plain(1))
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(side.batch(0)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    tw.save(model, optimizer, folder)


def optimizer_of_another(folder: str) -> None:
    side = Side("torch")
    actor, critic = side.two()
    tw.save(actor, side.optimizer(critic), folder)


def optimizer_of_none(folder: str) -> None:
    side = Side("torch")
    tw.save(side.shard(side.plain(1)), side.optimizer(side.plain(2)), folder)


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (second_of_thinwire, r"has made another optimizer for this model since.*AdamW\(model.encoder.parameters\(\)\)"),
        (common_part, "0.first.weight is sharded already, with another model.*shard a module that holds both"),
        (history, "LBFGS keeps '[a-z_]+' for first.weight, which is neither.*torch.distributed.checkpoint"),
        (optimizer_of_another, "AdamW updates no parameter of this model: save and load each model with its own"),
        (optimizer_of_none, r"a parameter of shape \(16, 8\) that is not sharded.*or of model.parameters\(\)"),
    ],
)
def test_one_sentence(program: Callable[[str], None], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"{UsageError.__name__}: .*{sentence}"):
        run_ranks(2, program, str(tmp_path))

"""Buffers that forwards change from each rank's data train as under DDP, which shares the first rank's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch import nn

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

from tests.support.frameworks.accelerate import job  # noqa: E402
from tests.support.frameworks.fabric import fabric_of  # noqa: E402
from tests.support.frameworks.lightning import Blocks, loader, trainer  # noqa: E402
from tests.support.frameworks.transformers import arguments, over  # noqa: E402

from thinwire.integrations.accelerate import ThinwireAccelerator  # noqa: E402
from thinwire.integrations.common.buffers import SharedBuffers  # noqa: E402
from thinwire.integrations.fabric import ThinwireFabricStrategy  # noqa: E402
from thinwire.integrations.lightning import ThinwireStrategy  # noqa: E402

STEPS = 6


class Centred(nn.Module):
    """Subtracts what it has seen, in a buffer of the state dict and in one that is not; the name is that of norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("offset", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean.data.lerp_(x.detach().mean(0), 0.5)  # by .data, as codebooks are: no version tells
            self.offset = self.offset * 0.5 + x.detach().amax(0)
        return x - self.running_mean - 0.1 * self.offset


class Net(nn.Sequential):
    """A model whose first layer has such buffers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Centred(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        loss = super().forward(x).square().mean()
        return loss if labels is None else (loss,)


def batches() -> Iterator[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    yield from torch.randn(STEPS, 3, 4)


def by_accelerate(plan: str | None, folder: Path, shares: bool) -> list[float]:
    with job():
        options = [accelerate.DistributedDataParallelKwargs(broadcast_buffers=shares)]
        made = {"cpu": True, "kwargs_handlers": options, "gradient_accumulation_steps": 2}
        accelerator = ThinwireAccelerator(plan=plan, **made) if plan else accelerate.Accelerator(**made)
        net: Any = Net()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.2))
        losses = []
        for batch in batches():
            with accelerator.accumulate(net):
                losses.append(net(batch))
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
        return [float(loss) for loss in losses]


def by_fabric(plan: str | None, folder: Path, shares: bool) -> list[float]:
    from lightning.fabric.strategies import DDPStrategy

    strategy = ThinwireFabricStrategy(plan, broadcast_buffers=shares) if plan else DDPStrategy(broadcast_buffers=shares)
    fabric = fabric_of(2, strategy)
    net: Any = Net()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.2))
    losses = []
    for batch in batches():
        losses.append(net(batch))
        fabric.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


class Module(Blocks):
    """Centres its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(0, Centred(16))

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        pass


def by_lightning(plan: str | None, folder: Path, shares: bool) -> list[float]:
    from lightning.pytorch.strategies import DDPStrategy

    strategy = ThinwireStrategy(plan, broadcast_buffers=shares) if plan else DDPStrategy(broadcast_buffers=shares)
    module = Module()
    run = trainer(2, strategy, str(folder), accumulate_grad_batches=2, limit_val_batches=1)
    run.fit(module, loader(2, STEPS, 2), loader(2, 1))
    return [*module.losses, *module.validated]


def by_the_trainer(plan: str | None, folder: Path, shares: bool) -> list[float]:
    torch.manual_seed(1)
    rows = [{"x": row, "labels": 0} for row in torch.randn(4 * STEPS, 4)]
    settings = arguments(folder, transformers.TrainingArguments, max_steps=STEPS, ddp_broadcast_buffers=shares)
    run = over(plan)(Net(), settings, train_dataset=rows)
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "course", [by_accelerate, by_fabric, by_lightning, by_the_trainer], ids=lambda course: course.__name__
)
@on_ranks(2)
def test_frameworks_train_as_under_ddp(course: Callable[[str | None, Path, bool], list[float]], tmp_path: Path) -> None:
    for shares in (True, False):
        want = course(None, tmp_path, shares)
        assert course("zero3", tmp_path, shares) == pytest.approx(want, rel=1e-5), shares


@on_ranks(2)
def test_buffers_of_every_layout_are_shared_and_constant_tables_are_left_out() -> None:
    rank, module = dist.get_rank(), nn.Module()
    kinds: list[Any] = [torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
    values = [torch.tensor([rank, 1, 2]).to(dtype) for dtype in (*kinds, torch.float8_e4m3fn)]
    values += [torch.tensor(rank), torch.ones(3, 2).mul(rank).t(), torch.ones(8).mul(rank)[::2], torch.empty(0)]
    values.append(torch.ones(3).mul(rank).expand(2, 3))
    for number, value in enumerate(values):
        module.register_buffer(f"kind{number}", value)
    module.register_buffer("table", torch.ones(3), persistent=False)
    module.register_buffer("changed", torch.full((3,), float(rank)), persistent=False)
    module.register_buffer("unset", None)
    shared = SharedBuffers([module, module])
    shared.share()
    for value in [*values, module.changed]:
        assert not value.flatten()[:1].float().any()
    module.table.fill_(rank)
    module.changed.fill_(rank)
    module.unset = torch.full((2,), float(rank))
    shared.share()
    assert [float(value[0]) for value in (module.table, module.changed, module.unset)] == [rank, 0, 0]

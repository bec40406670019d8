"""Frozen parameters that are kept encoded train as their decoded values do, bit for bit, and take the bytes that plans
say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import codecs
from thinwire.integrations.optimizers import is_sharded
from thinwire.spec import CodecSpec, Plan
from thinwire.testing import RankPool

pytestmark = pytest.mark.ranks

WORLD, WIDTH = 4, 24
INT8, INT4 = "int8:256", "int4:64"


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with contextlib.closing(RankPool(WORLD)) as pool:
        yield pool


class Adapted(nn.Module):
    """A frozen linear layer with a bias and a trained adapter, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x)) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(), Adapted()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(self.norm(x)))


class Model(nn.Module):
    """Units that mix frozen and trained parameters, one that is frozen, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build() -> Model:
    torch.default_generator.manual_seed(0)
    return Model()


def rounded(model: nn.Module, codec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with the values that a codec of whole blocks leaves of its frozen matrices."""
    spec = CodecSpec(codec)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.dim() > 1:
                flat = parameter.to(dtype).flatten()
                blocks = nn.functional.pad(flat, (0, -len(flat) % spec.block))
                wire = codecs.get(spec).encode(blocks)
                values = codecs.get(spec).decode(wire, blocks.numel(), dtype)
                parameter.copy_(values[: len(flat)].view_as(parameter))
    return model


def plan(name: str, codec: str = INT8, **changes: Any) -> Plan:
    changes = {"compute_dtype": "float32", **changes}
    made = Plan.preset(name, nodes=2, local=2, frozen={"storage": codec}, **changes)
    return made.with_(wire={"gather": "none"})  # which would round frozen parameters of the other model


def samples(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: nn.Module, optim: torch.optim.Optimizer, batches: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The losses and the gradients of some steps."""
    found = []
    for micro_batches in batches:
        losses = []
        for x in tw.micro_batches(model, micro_batches) if is_sharded(model) else micro_batches:
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        found += losses
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                grad = parameter.grad
                found.append((grad.full_tensor() if is_sharded(model) else grad).clone())
                assert found[-1].shape == parameter.shape, name
        optim.step()
        optim.zero_grad()
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def check_alone(plans: list[Plan], micro_batches: int) -> None:
    """Every rank has the same data, so that the means of gradients are exact."""
    batches = [[samples(7 * step + k, 0) for k in range(micro_batches)] for step in range(3)]
    for each in plans:
        alone = rounded(build(), str(each.frozen.storage))
        want = train(alone, adamw(alone), batches)
        model = tw.shard(build(), each)
        got = train(model, adamw(model), batches)
        assert all(map(torch.equal, got, want)), each.describe()
        for name, value in tw.full_state_dict(model).items():
            assert torch.equal(value, alone.state_dict()[name]), (name, each.describe())


@pytest.mark.parametrize("codec", [INT8, INT4, "int4:64,hadamard"])
@pytest.mark.parametrize("names", [("zero3", "ddp"), ("zero1", "hpz"), ("amsp-30b", "mics")])
def test_training_equals_one_process_with_rounded_weights(ranks: RankPool, names: tuple[str, ...], codec: str) -> None:
    ranks.run(check_alone, [plan(name, codec) for name in names], 1)


def check_beside_rounded(plans: list[Plan], micro_batches: int) -> None:
    """Ranks have data of their own: the same plan without the key trains a model of rounded weights alike."""
    rank = torch.distributed.get_rank()
    batches = [[samples(7 * step + k, rank) for k in range(micro_batches)] for step in range(3)]
    for each in plans:
        dtype = getattr(torch, each.compute_dtype)
        plain = tw.shard(rounded(build(), str(each.frozen.storage), dtype), each.with_(frozen={"storage": "none"}))
        want = train(plain, adamw(plain), batches)
        model = tw.shard(build(), each)
        assert all(map(torch.equal, train(model, adamw(model), batches), want)), each.describe()
        want, got = tw.full_state_dict(plain), tw.full_state_dict(model)
        assert all(torch.equal(value, got[name]) for name, value in want.items()), each.describe()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"compute_dtype": "bfloat16"},
    "modules": {"granularity": "module"},
    "modules together": {"granularity": "module", "gather_bytes": "1MiB"},
    "together": {"gather_bytes": "1MiB", "reduce_bytes": "1MiB"},
    "recomputed": {"recompute": True},
    "kept": {"persist_bytes": 1000, "reuse_bytes": 3000},
    "on the host": {"residence": {"params": "host", "optimizer": "host-stream", "gradients": "host"}},
    "whole tensors": {"partition": "inter"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "names", [("zero3", "ddp", "hpz"), ("zeropp-8bit", "thinwire", "zero1-node", "hpz again", "mics")], ids=str
)
def test_every_way_to_train(ranks: RankPool, names: tuple[str, ...], way: str) -> None:
    plans = [plan(name.removesuffix(" again"), **WAYS[way]) for name in names]
    plans = [p.with_(secondary_reuse=True) if name.endswith("again") else p for name, p in zip(names, plans)]
    ranks.run(check_beside_rounded, plans, 3 if way in ("plain", "kept", "on the host") else 1)

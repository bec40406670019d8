"""Models that are not a plain list of blocks train as in plain torch."""

from __future__ import annotations

import pytest
import torch
from tests.support.edge import WIDTH, Place, every
from torch import nn

from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    """A residual block; 11 is odd, so that shards have padding and cut tensors anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a list, between an input and an output layer."""

    def __init__(self, depth: int = 3, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# -- tied and shared -------------------------------------------------------------------------------------------


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding((x.abs() * 7).long().clamp(max=19))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedAcrossBlocks(Stack):
    """One matrix in two blocks, one norm in two others: their common ancestor holds them."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[3].norm = self.blocks[1].norm


class TiedInsideABlock(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        for block in self.blocks:
            block.up, block.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            block.down.weight = block.up.weight


class SameBlockTwice(Stack):
    """One block is registered twice, and so called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class CalledTwice(Stack):
    """Every block is called twice in a row, and the first once more at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(block(x))
        return self.last(self.blocks[0](x))


class UsedTwice(nn.Module):
    """One forward uses its parameters twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x * self.scale


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x)))) @ self.layer.weight.t()


# -- frozen ----------------------------------------------------------------------------------------------------


class FrozenUnits(Stack):
    """Whole units without gradients: at the start, where nothing needs one, and amid others."""

    def __init__(self) -> None:
        super().__init__(4)
        for frozen in (self.first, self.blocks[0], self.blocks[2]):
            frozen.requires_grad_(False)


class LowRank(nn.Module):
    """LoRA. The trainable path is called last and so is the first in backward: its gradients are complete before the
    frozen matrix is read on the way to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.frozen(torch.tanh(x))) + x @ self.a.T @ self.b.T


class LowRankStack(Stack):
    def __init__(self) -> None:
        super().__init__(3, LowRank)


class LowRankBehindFrozen(LowRankStack):
    """Nothing before the first block needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class LowRankCalledTwice(LowRankStack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(block(x))
        return self.last(x)


# -- unused, conditional ---------------------------------------------------------------------------------------


class UnusedParameters(Stack):
    """Parameters that never have a gradient, in a unit and on the root. Weight decay must leave them alone, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Linear(WIDTH, 3)
        self.spare = nn.Parameter(torch.randn(7))


class BlocksByStep(Stack):
    """Each step leaves out another block, on all ranks alike."""

    skipped = -1

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        model.skipped = place.step
        return model(x).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = block(x)
        return self.last(x)


class BlocksByMicroBatch(BlocksByStep):
    """The first block runs in the step's first micro-batch only, the last block in the last one only."""

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        model.skipped = 2 - 2 * place.micro_batch
        return model(x).square().mean()


class Branching(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Parameter(torch.ones(3))
        self.branches = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * self.extra if self.branches else x


class ParametersByRank(Stack):
    """One rank alone uses ``extra``: to the mean, the others contribute zeros."""

    def __init__(self) -> None:
        super().__init__(2, Branching)

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        for block in model.blocks:
            block.branches = place.rank == 1 + place.step
        return model(x).square().mean()


# -- sizes, shapes, types --------------------------------------------------------------------------------------


class SmallerThanTheWorld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] * self.weight


class OneLayer(nn.Linear):
    """The root is the only module, and the only unit."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 13)


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(13, 13)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x)) * self.gain + self.empty.sum()


class Shapes(nn.Module):
    """Scalars, empty tensors, singletons, odd and strided ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.single = nn.Parameter(torch.randn(1))
        self.strided = nn.Parameter(torch.randn(13, WIDTH).t())
        self.blocks = nn.ModuleList(Odd() for _ in range(2))
        self.image = nn.Conv2d(1, 3, (3, 1)).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.strided * self.gain + self.single + self.empty.sum()
        for block in self.blocks:
            x = block(x)
        return self.image(x[None, None])


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.shift)


class OnlyScalars(Stack):
    """Units of one element: most ranks hold nothing but padding."""

    def __init__(self) -> None:
        super().__init__(3, Shift)


class Half(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.half()


class Mixed(Stack):
    """Types differ inside a unit; an integer parameter is frozen by nature."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.half()
        self.blocks[2].norm.bfloat16()
        self.shift = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.shift.sum()


class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH, sparse=True)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding((x.abs() * 7).long().clamp(max=19)))


GROUPS: dict[str, tuple[type[nn.Module], ...]] = {
    "tied": (TiedEnds, TiedAcrossBlocks, TiedInsideABlock, SameBlockTwice, CalledTwice, UsedTwice),
    "frozen": (FrozenUnits, LowRankStack, LowRankBehindFrozen, LowRankCalledTwice),
    "unused": (UnusedParameters, BlocksByStep, BlocksByMicroBatch, ParametersByRank),
    "shapes": (SmallerThanTheWorld, OneLayer, Shapes, OnlyScalars),
    "types": (Half, Mixed, SparseGradient),
}


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=pytest.mark.slow) if group in {"types", "frozen"} else group for group in GROUPS],
)
def test_trains_as_in_plain_torch(group: str) -> None:
    run_ranks(4, every, GROUPS[group])

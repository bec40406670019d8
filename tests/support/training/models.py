"""Models that are not a plain list of blocks."""

from __future__ import annotations

import torch
from tests.support.training.edge import WIDTH
from torch import nn


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


class UnusedParameters(Stack):
    """Parameters that never have a gradient, in a unit and on the root. Weight decay must leave them alone, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Linear(WIDTH, 3)
        self.spare = nn.Parameter(torch.randn(7))


class Branching(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Parameter(torch.ones(3))
        self.branches = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * self.extra if self.branches else x


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


class Skipping(nn.Module):
    """Runs as many of its blocks as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for block in self.blocks[:count]:
            x = block(x)
        return x

"""CUDA graphs are refused wherever torch says that it captures them; what is compiled without them trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks

GRAPHS = {"triton.cudagraphs": True}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def sharded(model: nn.Module | None = None) -> nn.Module:
    return tw.shard(model or Stack(), tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))


def step(call: Callable[..., torch.Tensor]) -> None:
    call(torch.ones(2, 8)).sum().backward()


def compiled_block() -> None:
    model = Stack()
    model.blocks[0].compile(mode="reduce-overhead")
    sharded(model)


def replaced_block() -> None:
    model = Stack()
    model.blocks[0] = torch.compile(model.blocks[0], mode="max-autotune")
    sharded(model)


def block_compiled_later() -> None:
    model = sharded()
    model.blocks[1].compile(options=GRAPHS)
    step(model)


def model_compiled_in_place() -> None:
    model = sharded()
    model.compile(mode="reduce-overhead")
    step(model)


def wrapped_model() -> None:
    step(torch.compile(sharded(), mode="reduce-overhead"))


def function_around() -> None:
    model = sharded()
    step(torch.compile(lambda x: model(x).tanh(), options=GRAPHS))


def setting_of_the_process() -> None:
    model = sharded()
    model.blocks[0].compile()
    with torch._inductor.config.patch(GRAPHS):
        step(model)


REFUSED: dict[Callable[[], None], str] = {
    compiled_block: "^blocks.0 is compiled with triton.cudagraphs = True: .*max-autotune-no-cudagraphs",
    replaced_block: "^blocks.0 is compiled with triton.cudagraphs = True: ",
    block_compiled_later: "^blocks.1 is compiled with triton.cudagraphs = True: ",
    model_compiled_in_place: "^Stack is compiled with triton.cudagraphs = True: ",
    wrapped_model: "^what calls the model is compiled with triton.cudagraphs = True: ",
    function_around: "^what calls the model is compiled with triton.cudagraphs = True: ",
    setting_of_the_process: "^torch._inductor.config.triton.cudagraphs = True: .*set it to False",
}


@pytest.mark.slow
@on_ranks(2)
def test_cuda_graphs_are_refused_in_one_sentence() -> None:
    for case, sentence in REFUSED.items():
        torch._dynamo.reset()
        with pytest.raises(UsageError, match=sentence):
            case()


@on_ranks(2)
def test_what_captures_no_graph_trains() -> None:
    """A process that captures graphs elsewhere, and parts that are compiled by another backend, are no reason."""
    with torch._inductor.config.patch(GRAPHS):
        model = sharded()
        step(model)
        model.blocks[0].compile(backend="aot_eager")
        step(model)
        step(torch.compile(sharded(), backend="eager"))

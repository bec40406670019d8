"""``overlap.input_gradient``: a linear layer's reduction starts before its input gradient, and no number changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import (
    ADAMW,
    TOLERANCE,
    alone,
    build,
    every,
    gap,
    plan,
    raised,
    train_sharded,
    whole,
)
from tests.support.training.journal import keep_journal
from tests.support.training.models import (
    CalledTwice,
    LowRankStack,
    Stack,
    TiedAcrossBlocks,
)
from tests.support.training.scripts import (
    CHECKPOINTED,
    Dropping,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from thinwire.errors import SpecError
from thinwire.program import Lane, Phase, default_trace
from thinwire.sharding.api import runtime
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.ranks

FIRST: dict[str, Any] = {"granularity": "module", "overlap": {"input_gradient": True}}


# -- numbers ---------------------------------------------------------------------------------------------------


def losses(model_class: Callable[[], nn.Module], fields: dict[str, Any]) -> list[float]:
    """Losses of three steps of two micro-batches on this rank, and the sum of the parameters after them."""
    torch.default_generator.manual_seed(0)
    model = tw.shard(model_class(), plan("zero3", **fields))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    values = []
    for _ in range(3):
        for _ in tw.micro_batches(model, range(2)):
            ids = torch.randint(0, 64, (2, 9))
            loss = model(ids[:, :-1], labels=ids[:, 1:]).loss / 2
            loss.backward()
            values.append(loss.item())
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
    with tw.full_parameters(model):
        values += [p.double().sum().item() for p in model.parameters()]
    return values


def llama() -> Llama:
    return Llama(LlamaConfig(vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, ffn=48, seq=16))


def gpt() -> GPT:
    return GPT(GPTConfig(vocab=64, hidden=32, layers=2, heads=2, ffn=48, seq=16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "models"),
    [
        ({"granularity": "module", "compute_dtype": "bfloat16"}, (llama,)),
        ({"granularity": "module", "compute_dtype": "bfloat16"}, (gpt,)),
        ({"granularity": "module", "recompute": True}, (llama, gpt)),
        ({}, (llama, gpt)),
    ],
    ids=["llama", "gpt", "recomputed", "blocks"],
)
@on_ranks(4)
def test_built_in_models_train_alike_bit_by_bit(
    fields: dict[str, Any], models: tuple[Callable[[], nn.Module], ...]
) -> None:
    curves = [
        [losses(model, {**fields, "overlap": {"input_gradient": first}}) for first in (False, True)] for model in models
    ]
    for torchs_order, weights_first in curves:
        assert torchs_order == weights_first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "recompute"),
    [
        ((TiedAcrossBlocks, CalledTwice, LowRankStack), False),
        ((Dropping,), True),
        (CHECKPOINTED, False),
    ],
    ids=["shared weights", "recomputed", "checkpointed by the user"],
)
@on_ranks(4)
def test_models_of_all_kinds(models: tuple[Callable[[], nn.Module], ...], recompute: bool) -> None:
    every(models, plans=("zero3", "zero1-node"), changes={**FIRST, "recompute": recompute})


@pytest.mark.slow
@on_ranks(4)
def test_compiled_blocks() -> None:
    torch._dynamo.reset()
    reference = alone(Stack, range(2), micro_batches=2)
    model = tw.shard(build(Stack), plan("zero3", **FIRST))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    train_sharded(model, tw.optimizer(model, torch.optim.AdamW, **ADAMW), steps=range(2), micro_batches=2)
    assert gap(whole(model), list(reference.parameters())) <= TOLERANCE
    assert early(model), "in compiled blocks as well"


# -- when reductions start -------------------------------------------------------------------------------------


def early(model: nn.Module) -> set[str]:
    """Names of the units whose input gradient came right after their gradients in the traced backward."""
    engine = runtime(model)
    trace = engine.schedule.programs.trace
    assert trace is not None
    after = zip(trace.backward, trace.backward[1:], strict=False)
    return {engine.units[u].name for (_, u), second in after if second == (Phase.INPUT_GRADIENT, u)}


class Products(TorchDispatchMode):
    """Notes the shapes of matrix products, and what was known when each began."""

    def __init__(self, know: Callable[[], int]) -> None:
        super().__init__()
        self.know = know
        self.products: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.products.append((tuple(args[0].shape), tuple(args[1].shape), self.know()))
        return func(*args, **(kwargs or {}))


class Wedge(nn.Module):
    """Three layers whose products all have different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def reductions_before_products(first: bool) -> list[tuple[int, int]]:
    """The products of the second and third layer's input gradients: the layer, and the reductions started before."""
    torch.default_generator.manual_seed(0)
    model = tw.shard(Wedge(), plan("zero3", overlap={"input_gradient": first}))
    engine = runtime(model)
    for _ in range(2):
        model(torch.randn(5, 8, requires_grad=True)).sum().backward()
        engine.zero_grad()
    with keep_journal(engine) as journal:
        loss = model(torch.randn(5, 8)).sum()

        def started() -> int:
            return sum(start.lane is Lane.REDUCE for start in journal.step(engine.num_steps).starts)

        with Products(started) as products:
            loss.backward()
    return [
        (layer, count)
        for left, right, count in products.products
        for layer, shapes in ((2, ((5, 64), (64, 32))), (1, ((5, 32), (32, 16))))
        if (left, right) == shapes
    ]


@pytest.mark.parametrize(("first", "counts"), [(True, [(2, 1), (1, 2)]), (False, [(2, 0), (1, 1)])])
@on_ranks(4)
def test_a_layers_reduction_starts_before_its_input_gradient(first: bool, counts: list[tuple[int, int]]) -> None:
    """In torch's own backward, after it."""
    assert reductions_before_products(first) == counts


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(4)
def test_traces_are_those_that_plans_assume(recompute: bool) -> None:
    """The backward of the built-in models is the one that plans and simulations assume."""
    fields = {"recompute": recompute, "overlap": {"input_gradient": True}}
    for make, linears in ((llama, 7 * 2 + 1), (gpt, 4 * 2 + 1)):
        torch.default_generator.manual_seed(0)
        model = tw.shard(make(), plan("zero3", granularity="module", **fields))
        ids = torch.randint(0, 64, (2, 9))
        model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
        programs = runtime(model).schedule.programs
        trace, assumed = programs.trace, default_trace(programs.infos, recompute=programs.plan.recompute)
        assert trace is not None
        assert trace.forward == assumed.forward or make is gpt  # its halves run side by side
        assert len(early(model)) == linears * programs.plan.overlap.input_gradient
        # Layers with the same input leave their units together, when the last of them has added its part.
        late = {Phase.POST_BACKWARD}
        if make is llama:
            assert [m for m in trace.backward if m[0] not in late] == [m for m in assumed.backward if m[0] not in late]


@on_ranks(4)
def test_layers_may_have_been_sharded_before() -> None:
    """Layers that were sharded by themselves become units of a larger model, whose input is a leaf with a gradient."""
    first = plan("zero3", overlap={"input_gradient": True})
    model = Wedge()
    for layer in model.layers:
        tw.shard(layer, first)
    tw.shard(model, first)
    x = torch.randn(5, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    names = early(model)
    assert names == {"layers.0", "layers.1", "layers.2"}


# -- what is refused -------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(4, 4, 1) for _ in range(2)])


@pytest.mark.parametrize("granularity", ["module", "block"])
@on_ranks(4)
def test_a_model_without_linear_layers_of_their_own_is_refused(granularity: str) -> None:
    made = plan("zero3", **{**FIRST, "granularity": granularity})
    message = raised(SpecError, tw.shard, Convolutions(), made)
    assert "overlap.input_gradient = true" in message
    assert "Convolutions" in message
    assert f"granularity = {granularity!r}" in message
    assert ("set granularity = 'module'" in message) == (granularity == "block")


def test_tensor_parallel_ranks_are_refused() -> None:
    with pytest.raises(SpecError, match=r"overlap.input_gradient = true with tp = 2"):
        plan("zero1", tp=2, **FIRST)

"""Linear layers that compute the weight gradient first: torch's values, torch's promises, in another order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from thinwire.sharding.modules.linears import compute_weight_gradient_first, is_plain_linear


class Listener:
    """Tells ``note`` what it hears."""

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self.note, self.expected = note, 0

    def expect(self) -> None:
        self.expected += 1

    def begin(self) -> None:
        self.note("input")

    def end(self) -> None:
        self.expected -= 1


def pair(
    bias: bool = True, dtype: torch.dtype = torch.float32, note: Callable[[str], None] = lambda _: None
) -> tuple[nn.Linear, nn.Linear]:
    """torch's layer and ours with the same weights; ``note`` is told which gradient is next."""
    torch.default_generator.manual_seed(0)
    plain = nn.Linear(24, 16, bias=bias, dtype=dtype)
    ours = copy.deepcopy(plain)
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
    compute_weight_gradient_first(ours, Listener(note))
    return plain, ours


def trained(layer: nn.Linear, x: torch.Tensor, run: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run a backward through a layer with an input of its own; the gradient of the input."""
    x = x.clone().requires_grad_()
    run(layer, x).float().sin().sum().backward()
    assert x.grad is not None
    return x.grad


def assert_same(
    plain: nn.Linear, ours: nn.Linear, x: torch.Tensor, run: Callable[[nn.Linear, torch.Tensor], torch.Tensor]
) -> None:
    assert torch.equal(trained(plain, x, run), trained(ours, x, run))
    for parameter, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert parameter.grad.dtype == other.grad.dtype
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_layer_without_outputs() -> None:
    layer = nn.Linear(24, 0)
    compute_weight_gradient_first(layer, Listener())
    x = torch.randn(2, 3, 24, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(2, 3, 24))


@pytest.mark.parametrize("shape", [(2, 3, 24), (5, 24), (24,), (0, 24)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_torch_bit_by_bit(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    order: list[str] = []
    plain, ours = pair(bias, dtype, order.append)
    x = torch.randn(shape).to(dtype)
    assert_same(plain, ours, x, lambda layer, x: layer(2 * x).relu_())  # an activation in place writes to the output
    assert order[-1] == "input"
    assert sorted(order[:-1]) == sorted(name for name, _ in plain.named_parameters())


@pytest.mark.parametrize("wide_input", [True, False])
def test_autocast_computes_in_its_dtype(wide_input: bool) -> None:
    order: list[str] = []
    plain, ours = pair(note=order.append)
    x = torch.randn(4, 24).to(torch.float32 if wide_input else torch.bfloat16)

    def run(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = layer(x)
        assert y.dtype == torch.bfloat16
        return y

    assert_same(plain, ours, x, run)
    assert order[-1] == "input"


def called_twice(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(x) + layer(3 * x)


def checkpointed(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(layer, 2 * x, use_reentrant=False)
    return y


def checkpointed_reentrant(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(layer, 2 * x, use_reentrant=True)
    return y


def compiled(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.compile(lambda x: layer(x).tanh(), backend="aot_eager")(x)
    return y


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, where it goes on after a call
@pytest.mark.parametrize("run", [called_twice, checkpointed, checkpointed_reentrant, compiled])
def test_other_ways_of_calling_change_no_bit(run: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
    assert_same(*pair(), torch.randn(4, 24), run)


def test_a_retained_graph_runs_again_in_the_same_order() -> None:
    order: list[str] = []
    plain, ours = pair(note=order.append)
    x = torch.randn(4, 24, requires_grad=True)
    for layer in (plain, ours):
        loss = layer(x).sin().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert plain.weight.grad is not None
    assert ours.weight.grad is not None
    assert torch.equal(plain.weight.grad, ours.weight.grad)
    assert order[2] == order[5] == "input"


def test_gradients_of_gradients_are_right() -> None:
    layer = nn.Linear(5, 3).double()
    compute_weight_gradient_first(layer, Listener())
    x = torch.randn(4, 5, dtype=torch.double, requires_grad=True)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return y

    assert torch.autograd.gradcheck(run, (x, layer.weight, layer.bias))
    assert torch.autograd.gradgradcheck(run, (x, layer.weight, layer.bias))


def test_only_gradients_that_are_wanted() -> None:
    order: list[str] = []
    _, ours = pair(note=order.append)
    ours(torch.randn(4, 24)).sum().backward()
    assert "input" not in order
    x = torch.randn(4, 24, requires_grad=True)
    (grad,) = torch.autograd.grad(ours(x).sum(), x)
    torch.testing.assert_close(grad, ours.weight.sum(0).expand(4, 24))
    ours.weight.requires_grad_(False)
    order.clear()
    ours(x).sum().backward()
    assert order == ["bias"]  # nothing to hand over: torch's own node


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of forward-mode derivatives
def test_transforms_of_functions_go_through_torch() -> None:
    plain, ours = pair()
    x = torch.randn(4, 24)

    def loss(layer: nn.Linear) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        return lambda weights: torch.func.functional_call(layer, weights, (x,)).square().sum()

    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert torch.equal(torch.func.grad(loss(plain))(weights)["weight"], torch.func.grad(loss(ours))(weights)["weight"])
    assert torch.equal(torch.func.jvp(plain, (x,), (x,))[1], torch.func.jvp(ours, (x,), (x,))[1])
    with torch.no_grad():
        assert torch.equal(plain(x), ours(x))


def test_a_write_to_the_weight_before_the_backward_is_found_out() -> None:
    _, ours = pair()
    loss = ours(torch.randn(4, 24, requires_grad=True)).sum()
    with torch.no_grad():
        ours.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_undoing_leaves_the_layer_as_it_was() -> None:
    layer = nn.Linear(4, 4)
    undo = compute_weight_gradient_first(layer, Listener())
    assert "forward" in vars(layer)
    undo()
    assert "forward" not in vars(layer)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_which_layers_are_plain() -> None:
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    frozen = nn.Linear(4, 4).requires_grad_(False)
    half_frozen = nn.Linear(4, 4)
    half_frozen.bias.requires_grad_(False)
    others = [
        parametrizations.weight_norm(nn.Linear(4, 4)),
        Doubled(4, 4),
        replaced,
        frozen,
        half_frozen,
        nn.Bilinear(4, 4, 4),
        nn.Conv1d(4, 4, 1),
    ]
    assert is_plain_linear(nn.Linear(4, 4))
    assert is_plain_linear(nn.Linear(4, 4, bias=False))
    assert not any(is_plain_linear(other) for other in others)

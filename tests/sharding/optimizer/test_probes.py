"""Trials of optimizers happen where the model is, and errors of their own are shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.grads.optimizer_state import InnerOptimizer, make_state
from thinwire.sharding.optimizer.probes import Trial, distinct_options, options_tell_all, states_are_alike

CPU = torch.device("cpu")


class GpuOnly(torch.optim.SGD):
    """Refuses tensors of the CPU, as optimizers do whose kernels are written in CUDA."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type == "cpu":
                    raise RuntimeError("this optimizer works on GPU tensors\nand more lines")
        return super().step(closure)


def test_the_error_of_an_optimizer_is_shown() -> None:
    with pytest.raises(UsageError, match=r"^GpuOnly does not update .* on cpu.*: this optimizer works on GPU tensors$"):
        Trial(GpuOnly, {"lr": 0.1}, {}, CPU).refuse_per_tensor()
    Trial(torch.optim.SGD, {"lr": 0.1}, {}, CPU).refuse_per_tensor()


def test_trials_run_on_the_device_of_the_model() -> None:
    meta = torch.device("meta")  # the only other device of every machine; it has no values that could be compared
    with pytest.raises(NotImplementedError, match="Meta"):
        Trial(GpuOnly, {"lr": 0.1}, {}, meta).updates_in_parts()
    assert not Trial(GpuOnly, {"lr": 0.1}, {}, CPU).updates_in_parts()
    assert Trial(torch.optim.SGD, {"lr": 0.1}, {}, CPU).updates_in_parts()


class ByRatio(torch.optim.Optimizer):
    """Scales the update of groups that ask for it by the ratio of two norms, as LAMB does."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (grad := parameter.grad) is not None:
                    ratio = parameter.norm() / grad.norm() if group.get("adapt") else 1.0
                    parameter.add_(grad * ratio, alpha=-group["lr"])


def test_options_of_groups_are_tried() -> None:
    groups = [{"params": ["*.weight"], "lr": rate, "adapt": True} for rate in (0.1, 0.2)]
    assert distinct_options(groups) == [{}, {"lr": 1e-3, "adapt": True}]
    with pytest.raises(UsageError, match=r"^ByRatio updates whole tensors"):
        Trial(ByRatio, {"lr": 0.1}, groups[0], CPU).refuse_per_tensor()
    Trial(ByRatio, {"lr": 0.1}, {}, CPU).refuse_per_tensor()


class Lookahead(torch.optim.SGD):
    """Counts its calls, and goes back half the way in every tenth."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            if self.calls % 10 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))
        return super().step(closure)


def test_one_that_counts_its_calls_is_called_once_for_each_step() -> None:
    assert not Trial(Lookahead, {"lr": 0.1}, {}, CPU).updates_in_parts()
    fragment: Any = SimpleNamespace(value=nn.Parameter(torch.ones(4)))
    optim = Lookahead([fragment.value], lr=0.1)
    assert make_state(InnerOptimizer(optim, [fragment], [[]])) == [fragment]
    assert "slow" in optim.state[fragment.value]
    assert (optim.calls, optim.param_groups[0]["lr"]) == (0, 0.1)


class Held(torch.optim.SGD):
    """Needs more than its options, and counts its steps."""

    def __init__(self, params: Any, base: str, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.base, self.count = base, 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_hooks_and_attributes_are_not_told_by_options(kind: Any) -> None:
    def made() -> Any:
        optimizer = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    def tell_all(optimizer: Any) -> bool:
        return options_tell_all(optimizer, {"lr": 0.1}, CPU)

    assert tell_all(made())
    hooked, changed, stepping = made(), made(), made()
    hooked.register_step_post_hook(lambda *_: None)
    changed.largest = 0.1
    stepping.step = lambda: None
    assert not any(map(tell_all, (hooked, changed, stepping)))


class Settings:
    """Does not compare."""

    def __init__(self, bits: int) -> None:
        self.bits = bits


class WithSettings(torch.optim.SGD):
    """Keeps its options in an object, as those of bitsandbytes do."""

    def __init__(self, params: Any, lr: float, bits: int = 8) -> None:
        super().__init__(params, lr=lr)
        self.settings = Settings(bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_attributes_are_compared_by_what_they_hold(bits: int) -> None:
    optimizer = WithSettings([torch.nn.Parameter(torch.ones(3))], 0.1, bits)
    assert options_tell_all(optimizer, {"lr": 0.1}, CPU) == (bits == 8)


def test_an_optimizer_that_cannot_be_made_again_is_tried_as_it_is() -> None:
    optimizer = Held([torch.nn.Parameter(torch.ones(3))], "base")
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a trial called a hook"))
    assert states_are_alike(optimizer, CPU)
    assert not options_tell_all(optimizer, {"lr": 0.1}, CPU)
    assert (optimizer.count, dict(optimizer.state)) == (0, {})

"""Tests the properties of an optimizer by running it on small parameters, whatever its name.

Trials run on the device of the model, because some optimizers work on GPUs only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.optimizer.stock_optimizers import stand_in

_REFUSALS = (ValueError, RuntimeError, LookupError, TypeError, AttributeError, AssertionError)
"""Errors by which an optimizer refuses a trial."""


def distinct_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options that parameter groups add, each combination once, as trials take them; those of no group first."""
    added = ({name: value for name, value in group.items() if name != "params"} for group in groups)
    return list({repr(options): options for options in ({}, *map(_for_trial, added))}.values())


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer steps in ``train()`` and swaps an average into the parameters in ``eval()``, as
    schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can skip an update on the device: torch's fused ones read ``found_inf``, a tensor."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@dataclass(frozen=True)
class Trial:
    """Tries a class of optimizers, made with these options and those of a parameter group, on small parameters of a
    device."""

    optimizer_class: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    group: Mapping[str, Any]
    device: torch.device

    def refuse_per_tensor(self) -> None:
        """Refuse an optimizer whose update of a tensor differs from the updates of the tensor's parts.

        Raises:
            UsageError: The optimizer needs whole tensors, or fails by itself.
        """
        name = self.optimizer_class.__name__
        with _seeded(self.device):
            start, grads = self._drawn(8, 6), self._drawn(2, 8, 6)
        whole = nn.Parameter(start.clone())
        parts = [nn.Parameter(part.clone()) for part in start.view(-1).split([20, 28])]
        try:
            self._step([whole], [[g] for g in grads])
        except _REFUSALS as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{name} does not update a matrix of 8 x 6 on {self.device}, on which thinwire tries optimizers: "
                f"{reason}"
            ) from error
        try:
            self._step(parts, [g.view(-1).split([20, 28]) for g in grads])
            elementwise = torch.allclose(whole.detach().view(-1), torch.cat([p.detach() for p in parts]), rtol=1e-5)
        except _REFUSALS:
            elementwise = False
        if not elementwise:
            raise UsageError(
                f"{name} updates whole tensors, but the plan's partition = 'intra' (or sharded parameters, or tp) cuts "
                "them: use partition = 'inter' with params = 1x1 and tp = 1"
            )

    def refuse_unlike_ranks(self, *, cut: bool) -> None:
        """Refuse an optimizer whose updates would differ from rank to rank, which own different parameters if ``cut``.

        Raises:
            UsageError: The optimizer draws random numbers, or its update of a parameter depends on gradients of others.
        """
        name = self.optimizer_class.__name__
        remedy = (
            f"make it yourself, {name}(model.parameters(), ...): over shares, ranks draw the same "
            "numbers and norms are those of whole tensors"
        )
        first = self._first_of_two()
        if first is None:
            return
        again = self._first_of_two(seed=1)
        if again is not None and not torch.equal(first, again):
            raise UsageError(f"{name} draws random numbers, which differ from rank to rank; {remedy}")
        coupled = self._first_of_two(other=100.0) if cut else None
        if coupled is not None and not torch.equal(first, coupled):
            raise UsageError(
                f"{name} updates a parameter by other parameters' gradients, as a norm over all of them does, and each "
                f"rank sees its share only; {remedy}"
            )

    def _first_of_two(self, *, seed: int = 0, other: float = 1.0) -> torch.Tensor | None:
        """The first of two parameters after two updates; ``None`` if the optimizer refuses the trial. ``seed`` is that
        of the numbers it may draw, and ``other`` a factor for the gradients of the second parameter."""
        with _seeded(self.device):
            start, grads = self._drawn(2, 8, 6), self._drawn(2, 2, 8, 6)
            pair = [nn.Parameter(part.clone()) for part in start]
            seed_generators(self.device, seed)
            try:
                self._step(pair, [[one, two * other] for one, two in grads])
            except _REFUSALS:
                return None
        return pair[0].detach()

    def updates_in_parts(self) -> bool:
        """Whether updating some parameters in one ``step`` and the rest in the next equals one update of all. This does
        not hold for optimizers that count their calls, even if the counter matters later only, or combine all
        parameters."""
        with _seeded(self.device):
            start, grads = self._drawn(2, 8, 6), self._drawn(3, 2, 8, 6)
        together = [nn.Parameter(part.clone()) for part in start]
        apart = [nn.Parameter(part.clone()) for part in start]
        try:
            one_call = self._step(together, list(grads))
            halves = [step for one, other in grads for step in ((one, None), (None, other))]
            two_calls = self._step(apart, halves)
        except _REFUSALS:
            return False
        if list(_numbers(one_call)) != list(_numbers(two_calls)):
            return False
        return all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))

    def kept_of_one(self) -> list[Any] | None:
        """What the optimizer keeps of a parameter after a step; ``None`` if it refuses the trial."""
        parameter = _one_parameter(self.device)
        try:
            optimizer = self._step([parameter], [[torch.ones_like(parameter)]])
        except _REFUSALS:
            return None
        return list(optimizer.state[parameter].values())

    def _drawn(self, *shape: int) -> torch.Tensor:
        """Random numbers, fp32, which are the same whatever the device."""
        return torch.randn(shape, dtype=torch.float32, device="cpu").to(self.device)

    def _step(
        self, params: Sequence[nn.Parameter], grads: Sequence[Sequence[torch.Tensor | None]]
    ) -> torch.optim.Optimizer:
        """Make an optimizer of a group of parameters, and let it step with each of these lists of their gradients."""
        with torch.enable_grad():
            group = {**_for_trial(self.group), "params": params}
            optimizer: Any = self.optimizer_class([group], **_for_trial(self.options))
            if has_modes(optimizer):
                optimizer.train()
            for step in grads:
                for parameter, grad in zip(params, step, strict=True):
                    parameter.grad = None if grad is None else grad.clone()
                optimizer.step()
        made: torch.optim.Optimizer = optimizer
        return made


def _numbers(kept: Any) -> Iterator[float]:
    """All numbers in an optimizer, in its groups and states, and in optimizers that it wraps."""
    if isinstance(kept, int | float):
        yield kept
    elif isinstance(kept, torch.Tensor) and kept.dim() == 0:
        yield kept.item()
    else:
        parts = vars(kept) if isinstance(kept, torch.optim.Optimizer) else kept
        parts = tuple(parts.values()) if isinstance(parts, Mapping) else parts
        for part in parts if isinstance(parts, list | tuple) else ():
            yield from _numbers(part)


def state_bytes(optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device) -> int:
    """Bytes per element of the tensors that an optimizer keeps of each parameter's size; 0 if it refuses the trial."""
    kept = Trial(optimizer_class, options, {}, device).kept_of_one() or ()
    sized = [value for value in kept if isinstance(value, torch.Tensor) and value.numel() == _ONE.numel()]
    return sum(value.itemsize for value in sized)


def states_are_alike(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether everything that an optimizer keeps of a parameter is a number or has the parameter's shape. The trial is
    one of its attributes too, as nobody knows how it was made."""
    parameter = _one_parameter(device)
    parameter.grad = torch.ones_like(parameter)
    tried: Any = stand_in(optimizer, [{**optimizer.param_groups[0], "params": [parameter]}])
    try:
        if has_modes(tried):
            tried.train()
        tried.step()
    except _REFUSALS:
        return False
    return all(
        value.dim() == 0 or value.shape == _ONE
        if isinstance(value, torch.Tensor)
        else isinstance(value, bool | int | float | None)
        for value in tried.state[parameter].values()
    )


def options_tell_all(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether another optimizer of the same class and options would be the same: it has no hooks, and no attribute that
    was set in another way."""
    try:
        another = type(optimizer)([_one_parameter(device)], **options)
    except _REFUSALS:
        return False
    mine, its = (
        {key: value for key, value in vars(item).items() if key not in _CHANGING} for item in (optimizer, another)
    )
    # Schedulers wrap the step.
    same_step = inspect.unwrap(optimizer.step) is inspect.unwrap(another.step)
    return same_step and mine.keys() == its.keys() and all(_are_equal(mine[key], its[key]) for key in mine)


_CHANGING: Final = frozenset({"param_groups", "state", "step", "_opt_called"})
"""Attributes of an optimizer that its parameters, steps and schedulers change."""


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values are known to hold the same; those of a class that does not compare are by their attributes."""
    kind: Any = type(one)
    if one is other or kind is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    try:
        if getattr(kind, "__eq__", None) is object.__eq__ and not callable(one):
            return bool(vars(one) == vars(other))
        return bool(one == other)
    except _REFUSALS:
        return False


_ONE: Final = torch.Size((8, 6))
"""Shape of the parameter of a trial with one."""


def _one_parameter(device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.ones(_ONE, dtype=torch.float32, device=device))


def with_fused(optimizer_class: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with torch's fused update, if the class has one for the processor and the options choose none."""
    fused = {**options, "fused": True}
    if not options.keys().isdisjoint({"fused", "foreach", "capturable", "differentiable"}):
        return options
    trial = Trial(optimizer_class, fused, {}, torch.device("cpu"))
    return options if trial.kept_of_one() is None else fused


@contextlib.contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Context with random numbers of its own, the same in every trial."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(device, 0)
        yield


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's generators of the CPU and of a device; ``torch.manual_seed`` would seed every device of the machine,
    and take longer than a trial where there is none."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _for_trial(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a trial has them: a huge learning rate could overflow, ``capturable`` requires CUDA, and an optimizer
    may write to tensors among them."""
    return {
        name: 1e-3 if name == "lr" else value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
        if name != "capturable"
    }

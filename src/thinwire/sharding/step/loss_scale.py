"""The factor that keeps gradients inside the range of float16 (Micikevicius et al., 2018, arXiv 1710.03740)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from thinwire.errors import CheckpointError, NonFiniteError, UsageError
from thinwire.units import is_number, whole

_LARGEST: Final = float(torch.finfo(torch.float32).max)


class LossScale:
    """A loss scale that follows the gradients: it grows while they are finite, and shrinks when they overflow.

    A backward from the scaled loss gives scaled gradients, so that small ones do not become zero in float16. Clipping,
    or else the optimizer's step, divides the combined fp32 gradients by the scale. A step whose gradients are not
    finite is skipped, and the scale shrinks. The rule and its defaults are those of ``torch.amp.GradScaler``. All ranks
    follow the norm that they have agreed on, so that the scale needs no exchange of its own.

    Args:
        initial: Scale of the first step.
        growth: Factor by which the scale grows, at least 1. With 1, it never grows.
        backoff: Factor by which the scale shrinks, above 0 and at most 1. With 1, it never shrinks.
        growth_interval: Number of finite steps in a row after which the scale grows.
        floor: Smallest scale. Training ends if gradients are not finite there.

    Attributes:
        applied: Whether a loss was scaled since the last step.
        await_update: Waits until the last step's :meth:`update` was called. Where the device decides whether it skips a
            step, the host learns of it when it needs the scale again.

    Raises:
        UsageError: A value is out of its range.
    """

    def __init__(
        self,
        initial: float = 65536.0,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        floor: float = 1.0,
    ) -> None:
        for name, value, valid, least, most in (
            ("growth", growth, "at least 1", 1.0, math.inf),
            ("backoff", backoff, "above 0 and at most 1", math.ulp(0.0), 1.0),
            ("floor", floor, "above 0", math.ulp(0.0), math.inf),
            ("initial", initial, f"from floor = {floor} to {_LARGEST:g}", floor, _LARGEST),
        ):
            if not (is_number(value) and least <= value <= most):
                raise UsageError(f"LossScale({name}={value!r}): {name} should be {valid}")
        self.growth, self.backoff, self.floor = growth, backoff, floor
        self.growth_interval = whole("growth_interval", growth_interval)
        self._value = _rounded(initial)
        self._finite_steps = self._skipped_steps = 0
        self.applied = False
        self.await_update: Callable[[], None] = _nothing_to_await
        self._model: weakref.ref[nn.Module] | None = None

    def __repr__(self) -> str:
        """The present scale and the number of skipped steps."""
        return f"LossScale({self.value:g}, {self.skipped_steps} steps skipped)"

    @property
    def value(self) -> float:
        """The present scale."""
        self.await_update()
        return self._value

    @property
    def applied_value(self) -> float:
        """The scale that :meth:`scale` has applied since the last step, which the last step may still change."""
        return self._value

    @property
    def finite_steps(self) -> int:
        """Number of finite steps since the scale changed."""
        self.await_update()
        return self._finite_steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because their gradients were not finite."""
        self.await_update()
        return self._skipped_steps

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale.

        Args:
            loss: Loss of any shape. One in float16 is widened first, because the product would overflow.

        Returns:
            The scaled loss, in fp32 or wider, on the same device.
        """
        value = self.value
        self.applied = True
        return (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * value

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale shrinks after a step that is not finite."""
        return self.backoff < 1.0

    def belong_to(self, model: nn.Module) -> None:
        """Use this scale for a model.

        Raises:
            UsageError: Another model uses it: its step would change the scale before this model's step divides by it.
        """
        if self._model is not None and self._model() is not model:
            raise UsageError(
                "a LossScale belongs to one model and its optimizer; make another LossScale for this one, or compute "
                "in bfloat16, which needs none"
            )
        self._model = weakref.ref(model)

    def update(self, *, finite: bool) -> float:
        """End a step.

        Args:
            finite: Whether the gradients of all ranks were finite. If not, the step was skipped.

        Returns:
            The new scale divided by the old one.

        Raises:
            NonFiniteError: The gradients were not finite, and the scale is already at its floor.
        """
        self.applied = False
        before = self._value
        if finite:
            self._finite_steps += 1
            if self._finite_steps == self.growth_interval:
                self._finite_steps = 0
                grown = _rounded(before * self.growth)
                self._value = grown if grown <= _LARGEST else before
            return self._value / before
        self._skipped_steps += 1
        self._finite_steps = 0
        if self.is_dynamic:
            self._value = max(_rounded(before * self.backoff), self.floor)
            if self._value == before:
                raise NonFiniteError(
                    "the gradient is not finite even with the smallest loss scale, loss_scale.floor = "
                    f"{self.floor:g}: lower the learning rate, look at the data, or compute in bfloat16 or float32"
                )
        return self._value / before

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the scale, the finite steps since it changed, and the skipped steps."""
        return {"value": self.value, "finite_steps": self.finite_steps, "skipped_steps": self.skipped_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint, which :func:`checked_state` has checked."""
        self.await_update()
        self._value = float(state["value"])
        self._finite_steps, self._skipped_steps = state["finite_steps"], state["skipped_steps"]


def checked_state(state: Any) -> Mapping[str, Any] | None:
    """Check the state of a loss scale in a checkpoint, which may have none.

    Raises:
        CheckpointError: It is corrupt.
    """
    if state is None:
        return None
    table = state if isinstance(state, Mapping) else {}
    value, counts = table.get("value"), [table.get(name) for name in ("finite_steps", "skipped_steps")]
    scales = isinstance(value, int | float) and 0.0 < value <= _LARGEST
    if not scales or not all(type(count) is int and count >= 0 for count in counts):
        raise CheckpointError(f"corrupt: its loss scale is {state!r}")
    return table


def _nothing_to_await() -> None:
    """Nothing is under way."""


def _rounded(value: float) -> float:
    """A scale as fp32 holds it, like that of torch's ``GradScaler``; infinity beyond the range of fp32."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))

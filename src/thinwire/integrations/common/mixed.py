"""Precisions of Lightning's ``Trainer`` and ``Fabric``, which are those of plans, and the loss scale of float16."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from thinwire.errors import UsageError
from thinwire.sharding.step.loss_scale import LossScale

COMPUTE_DTYPES: Final = {"32-true": "float32", "bf16-mixed": "bfloat16", "16-mixed": "float16"}
"""Lightning's precisions, and the ``compute_dtype`` of a plan that has the same effect."""


def checked_precision(plugin: Any, known: Collection[type]) -> str:
    """The precision that a plugin of Lightning stands for, of the ``known`` classes that thinwire takes the place of.

    Raises:
        UsageError: thinwire does not know the precision, or the plugin does more than set one.
    """
    name = str(plugin.precision)
    valid = ", ".join(map(repr, COMPUTE_DTYPES))
    if name not in COMPUTE_DTYPES:
        raise UsageError(
            f"precision = {name!r}: the strategy 'thinwire' supports {valid}. Masters are always float32; 'bf16-mixed' "
            "computes in bfloat16 and needs no loss scale"
        )
    if type(plugin) not in known:
        raise UsageError(
            f"the plugin {type(plugin).__name__}: the strategy 'thinwire' sets the precision by the plan; leave the "
            f"plugin out and set precision = one of {valid}"
        )
    return name


class ShardedPrecision:
    """What the precisions of a trainer and of Fabric over thinwire have in common. Put it before Lightning's own.

    Args:
        precision: One of :data:`COMPUTE_DTYPES`.
        strategy: The strategy, which knows the device of this rank.
        scaler: With ``"16-mixed"``, the ``GradScaler`` whose settings the loss scale takes; by default, torch's.

    Attributes:
        loss_scale: Scale of the losses of ``"16-mixed"``, in place of torch's ``GradScaler``; ``None`` for the others.
        scaler: torch's ``GradScaler``, which takes the place of ``loss_scale`` for several optimizers; else ``None``.
    """

    loss_scale: LossScale | None

    def __init__(self, precision: str, strategy: Any, scaler: Any = None) -> None:
        self.precision, self._strategy, self._given = precision, strategy, scaler
        self.scaler: Any = None
        scales = precision == "16-mixed"
        self.loss_scale = None if not scales else LossScale() if scaler is None else scale_like(scaler)

    def scale_each_optimizer(self) -> None:
        """Let torch's ``GradScaler`` scale losses, which divides the gradients of each optimizer when it steps."""
        if self.loss_scale is not None:
            self.loss_scale, self.scaler = None, self._given or torch.amp.GradScaler(self._strategy.root_device.type)

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of a forward: parameters have the dtype of the plan, and losses are computed in float32."""
        if self.precision == "32-true":
            return nullcontext()
        # Parameters are not cast here, so that there is nothing to cache.
        dtype: torch.dtype = getattr(torch, COMPUTE_DTYPES[self.precision])
        return torch.autocast(self._strategy.root_device.type, dtype=dtype, cache_enabled=False)


def register(registry: Any, strategy: type) -> None:
    """Give a strategy its names in one of Lightning's registries: ``thinwire``, and one for each preset of ZeRO."""
    registry.register("thinwire", strategy, description="shards by thinwire's preset zero3")
    for preset in ("zero1", "zero2", "zero3"):
        about = f"shards by thinwire's preset {preset}"
        registry.register(f"thinwire_{preset}", strategy, description=about, plan=preset)


def scale_like(scaler: Any) -> LossScale:
    """A loss scale with the settings and the present scale of torch's ``GradScaler``."""
    if not scaler.is_enabled():
        return LossScale(1.0, growth=1.0, backoff=1.0)
    read: Callable[[], float] = scaler.get_scale
    return LossScale(
        read(),
        growth=scaler.get_growth_factor(),
        backoff=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


def scaler_state(scale: LossScale) -> dict[str, Any]:
    """The state dict of a ``GradScaler`` that would continue as a loss scale does."""
    return {
        "scale": scale.value,
        "growth_factor": scale.growth,
        "backoff_factor": scale.backoff,
        "growth_interval": scale.growth_interval,
        "_growth_tracker": scale.finite_steps,
    }


def restore_scaler(scale: LossScale, state: dict[str, Any]) -> None:
    """Continue as the ``GradScaler`` of a state dict does."""
    skipped = scale.skipped_steps
    scale.restore({"value": state["scale"], "finite_steps": state["_growth_tracker"], "skipped_steps": skipped})

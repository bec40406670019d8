"""Handles models that are sharded part by part, as with ``fully_shard``: first each block, then the whole model."""

from __future__ import annotations

from torch import nn

from thinwire.collectives.group import control
from thinwire.errors import UsageError
from thinwire.sharding.modules.discover import Selection
from thinwire.sharding.runtime.runtime import plan_of, runtime_of
from thinwire.spec import Plan

__all__ = ["join_parts"]

_PART = "_thinwire_part"
"""Attribute of a module that was sharded before the module around it; it becomes a unit."""


def join_parts(model: nn.Module, plan: Plan, units: Selection, members: tuple[int, ...] | None) -> Selection:
    """Turn the sharded parts of a model back into plain modules, so that the model can be sharded as a whole.
    Collective.

    Args:
        model: The model.
        plan: Plan of the model.
        units: Units that the user has chosen, or ``None``.
        members: Global ranks that train the model; ``None`` for all ranks of the job.

    Returns:
        The units of the model: the parts, unless the user has chosen units.

    Raises:
        UsageError: The model itself is sharded, or a part has another plan or an optimizer.
    """
    if hasattr(model, "_thinwire_runtime"):
        raise UsageError(f"{type(model).__name__} is sharded already; build a new model to use another plan")
    for name, module in model.named_modules():
        if hasattr(module, "_thinwire_runtime"):
            _check(name, module, plan, members)
            runtime_of(module).dissolve()
            object.__setattr__(module, _PART, True)
    parts = [module for module in model.modules() if hasattr(module, _PART)]
    return units if units is not None or not parts else parts


def _check(name: str, part: nn.Module, plan: Plan, members: tuple[int, ...] | None) -> None:
    runtime, present = runtime_of(part), plan_of(part)
    ranks = runtime.control
    if ranks is not control(members):
        raise UsageError(
            f"its module {name!r} is sharded already, over ranks {list(ranks.ranks)}: give "
            "every part and the model the same mesh= or group="
        )
    if present.fingerprint() != plan.fingerprint():
        raise UsageError(
            f"its module {name!r} is sharded already, under another plan ({present.describe()}): give every "
            "part and the model the same plan"
        )
    if runtime.optimizer is not None or runtime.num_steps:
        raise UsageError(
            f"its module {name!r} is sharded already and in training: shard all parts and the model before the "
            "optimizer is made"
        )

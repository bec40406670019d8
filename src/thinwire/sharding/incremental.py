"""Handles models that are sharded part by part, as with ``fully_shard``: first each block, then the whole model.

Parts become units of the model. What a part's plan says otherwise than the model's, and a unit may have to itself,
becomes an exception of the model's plan.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from thinwire.collectives.group import control
from thinwire.errors import UsageError
from thinwire.sharding.modules.discover import Selection
from thinwire.sharding.params.flat_buffer import set_local
from thinwire.sharding.runtime.runtime import RUNTIME, Runtime, plan_of, runtime_of
from thinwire.sharding.runtime.sharded_parameters import forget_share
from thinwire.spec import CodecSpec, Factor, Plan, UnitOverride, Wire
from thinwire.spec.renames import TUNED

_PART = "_thinwire_part"
"""Attribute of a module that was sharded before the module around it; it becomes a unit."""

_WHOLE: Final = Factor(local=1, nodes=1)

_OF_THE_MODEL: Final = frozenset((*TUNED, "name", "overlap", "units"))
"""Fields of a part's plan that say when something travels, or that are carried over apart."""


def join_parts(
    model: nn.Module, plan: Plan, units: Selection, members: tuple[int, ...] | None
) -> tuple[Selection, Plan]:
    """Turn the sharded parts of a model back into plain modules, so that the model can be sharded as a whole.
    Collective.

    Returns:
        The units of the model: the parts, unless the user has chosen units. And its plan, with the exceptions of parts.

    Raises:
        UsageError: The model itself is sharded, or a part has a plan that is no exception of the model's, or an
            optimizer.
    """
    if hasattr(model, RUNTIME):
        raise UsageError(f"{type(model).__name__} is sharded already; build a new model to use another plan")
    exceptions: list[UnitOverride] = []
    for name, module in model.named_modules():
        if hasattr(module, RUNTIME):
            _check(name, module, members)
            exceptions += _exceptions(name, plan_of(module), plan)
            _dissolve(runtime_of(module))
            object.__setattr__(module, _PART, True)
    parts = [module for module in model.modules() if hasattr(module, _PART)]
    if exceptions:
        plan = plan.model_copy(update={"units": (*plan.units, *exceptions)})
    return (units if units is not None or not parts else parts), plan


def _check(name: str, part: nn.Module, members: tuple[int, ...] | None) -> None:
    runtime = runtime_of(part)
    ranks = runtime.control
    if ranks is not control(members):
        raise UsageError(
            f"its module {name!r} is sharded already, over ranks {list(ranks.ranks)}: give "
            "every part and the model the same mesh= or group="
        )
    if runtime.optimizer is not None or runtime.num_steps:
        raise UsageError(
            f"its module {name!r} is sharded already and in training: shard all parts and the model before the "
            "optimizer is made"
        )


def _dissolve(runtime: Runtime) -> None:
    """Restore the whole parameters of a part and remove its runtime. Collective."""
    shares = runtime.shares
    assert shares is not None
    runtime.join_spreads()
    with torch.no_grad():
        wholes = {name: share.full_tensor() for name, share in shares.items()}
    for undo in reversed(runtime.undo):
        undo()
    for unit in runtime.units:
        for buffer in unit.buffers:
            for slot, parameter in buffer.named:
                set_local([parameter], [wholes[slot.name]])
                forget_share(parameter)
    sharded = runtime.sharded
    sharded.lanes.close()
    object.__delattr__(sharded.model, RUNTIME)


def _exceptions(name: str, part: Plan, plan: Plan) -> list[UnitOverride]:
    """What a part's plan says otherwise than the model's, as exceptions for the part's unit.

    Raises:
        UsageError: It says what a unit cannot have to itself.
    """
    own = UnitOverride(match=name)
    same = set(_OF_THE_MODEL)
    if part.compute_dtype != plan.compute_dtype and part.effective_reduce_dtype == plan.effective_reduce_dtype:
        own = own.model_copy(update={"dtype": part.compute_dtype})
        same |= {"compute_dtype", "reduce_dtype"}
    if part.params != plan.params and part.params == _WHOLE:
        own = own.model_copy(update={"keep_gathered": True})
        same |= {"params", "grads", "secondary", "secondary_reuse"}
    if part.wire != plan.wire and part.wire == Wire():
        own = own.model_copy(update={"codec": CodecSpec()})
        same |= {"wire"}
    fields = [field for field in Plan.model_fields if field not in same]
    different = [field for field in fields if getattr(part, field) != getattr(plan, field)]
    if different:
        there = ", ".join(f"{field} = {getattr(part, field)}" for field in different)
        raise UsageError(
            f"its module {name!r} is sharded already, under a plan with {there}, which the model's plan says otherwise "
            f"({', '.join(str(getattr(plan, field)) for field in different)}): a part may compute in another dtype, if "
            "reduce_dtype is the same, stay gathered, with params = 1x1, or travel without codecs; give it the model's "
            "plan in the rest"
        )
    inner = [] if part.units == plan.units else part.units
    of_part = [one.model_copy(update={"match": f"{name}.{one.match}"}) for one in inner]
    return [*([own] if own != UnitOverride(match=name) else []), *of_part]

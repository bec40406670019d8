"""Makes any torch optimizer over this rank's fragments, in the parameter groups that the user wants."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from thinwire.agreement import NOTHING
from thinwire.errors import UsageError
from thinwire.sharding.grads.host_states import HostStates
from thinwire.sharding.grads.host_updates import HostUpdates
from thinwire.sharding.grads.optimizer_state import InnerOptimizer, Unreadable
from thinwire.sharding.grads.unit_gradient import OwnedFragment
from thinwire.sharding.optimizer.probes import Trial, distinct_options, state_bytes, with_fused
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.optimizer.stock_optimizers import INNER
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.runtime.runtime import runtime_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.sharding.step.sharded_model import ShardedModel


def build_optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    param_groups: Iterable[Mapping[str, Any]] | None,
    skip_nonfinite: bool,
    loss_scale: LossScale | None,
    options: Mapping[str, Any],
) -> ShardedOptimizer:
    """Make the wrapped optimizer over this rank's fragments; see :func:`thinwire.optimizer`."""
    if not isinstance(optimizer_class, type):
        raise UsageError(
            f"thinwire.optimizer takes a class and makes the optimizer itself: write thinwire.optimizer(model, "
            f"torch.optim.{type(optimizer_class).__name__}, ...), with the options instead of the parameters"
        )
    if options.get("differentiable"):
        raise UsageError("differentiable = True: no gradient flows through an update of shares; leave it out")
    runtime = runtime_of(model)
    sharded, plan = runtime.sharded, runtime.plan
    if plan.scales_loss and loss_scale is None:
        raise UsageError(
            "the plan's gradients are float16, in which small ones are zero: scale the loss with loss_scale = "
            "thinwire.LossScale(), in place of torch's GradScaler; GradScaler works with optimizers that are made from "
            "model.parameters()"
        )
    fragments, device = sharded.fragments, sharded.device
    given = list(param_groups or [])
    if not all(isinstance(group, Mapping) for group in given):
        raise UsageError(
            f"param_groups = {param_groups!r}: give a list of tables, such as [{{'params': ['*bias'], 'lr': 1e-3}}]"
        )
    try_groups = partial(_try_groups, model, optimizer_class, options)
    by_unit = try_groups(given)
    groups, shown, group_of = _group(sharded.units, runtime.shares or {}, fragments, given)

    def refused(problems: Mapping[int, str]) -> UsageError:
        rank, text = next(iter(problems.items()))
        return UsageError(f"{optimizer_class.__name__} refuses the parameters or options of rank {rank}: {text}")

    made: list[torch.optim.Optimizer] = []

    if plan.residence.optimizer == "host-update" and device.type != "cpu":
        options = with_fused(optimizer_class, options)

    def make() -> None:
        try:
            made.append(optimizer_class(groups, **options))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(str(error)) from error

    # If one rank cannot make the optimizer, every rank raises, so that none continues alone.
    sharded.part.control.agree(make, refused, NOTHING)
    (inner,) = made
    object.__setattr__(inner, INNER, True)
    host: HostStates | HostUpdates | None = None
    if plan.residence.optimizer == "host-update":
        ranks = None if device.type == "cpu" else plan.mesh.local
        host = HostUpdates(sharded.units, sharded.gradients, sharded.lanes, device, ranks)
    elif not plan.residence.on_device:
        nbytes = state_bytes(optimizer_class, options, device) if plan.residence.streams_states else None
        host = HostStates(inner, fragments, sharded.units, sharded.gradients, sharded.lanes, device, nbytes)
    runtime.optimizer = optimizer = ShardedOptimizer(
        runtime,
        InnerOptimizer(inner, fragments, shown, host),
        skip_nonfinite=skip_nonfinite,
        by_unit=by_unit,
        try_groups=try_groups,
        loss_scale=loss_scale,
        group_of=group_of,
        rest=len(groups) - 1 if len(groups) > len(given) else None,
    )
    return optimizer


def _try_groups(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Iterable[Mapping[str, Any]],
) -> bool:
    """Refuse what :func:`refuse_class` does; returns whether units can be updated one by one."""
    groups, device = list(groups), _updates_on(runtime_of(model).sharded)
    refuse_class(model, optimizer_class, options, groups)
    return all(Trial(optimizer_class, options, group, device).updates_in_parts() for group in distinct_options(groups))


def refuse_class(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Iterable[Mapping[str, Any]],
) -> None:
    """Refuse an optimizer whose updates of pieces, rank by rank, are not those of whole tensors. Options of its groups
    may change what it does.

    Raises:
        UsageError: See :mod:`thinwire.sharding.optimizer.probes`.
    """
    sharded = runtime_of(model).sharded
    plan, device = sharded.plan, _updates_on(sharded)
    # Decide from the plan rather than from this rank's fragments, so that all ranks decide alike.
    cut = plan.optimizer.ranks > 1 and not (plan.partition == "inter" and plan.params.ranks == 1)
    for group in distinct_options(groups):
        trial = Trial(optimizer_class, options, group, device)
        if plan.world > 1:
            trial.refuse_unlike_ranks(cut=plan.optimizer.ranks > 1)
        if cut or sharded.part.tensor_ranks > 1:
            trial.refuse_per_tensor()


def _updates_on(sharded: ShardedModel) -> torch.device:
    return torch.device("cpu") if sharded.plan.residence.optimizer == "host-update" else sharded.device


def _group(
    units: Sequence[Unit],
    shares: Mapping[str, ShardedParameter],
    fragments: Sequence[OwnedFragment],
    groups: list[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[list[Any]], dict[str, int]]:
    """Sort fragments into parameter groups by their parameters. Parameters in no group form the last one. All ranks
    have the same groups, but a rank may own no element of a group.

    Returns:
        The groups; for each what it shows: its trained parameters, in the order of units; and the numbers of the
        given groups, by name of the parameter.
    """
    names = {id(p): slot.name for unit in units for buffer in unit.buffers for slot, p in buffer.named}
    names |= {id(share): name for name, share in shares.items()}
    every_name = list(names.values())
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        for name in names_of(group, names, every_name, number):
            if group_of.setdefault(name, number) != number:
                raise UsageError(
                    f"parameter {name!r} is in param_groups[{group_of[name]}] and in param_groups[{number}]; each "
                    "parameter belongs to one group"
                )
    cut: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    trained = {slot.name for unit in units for b in unit.buffers if b.layout.trainable for slot in b.layout.slots}
    if trained - group_of.keys() or not cut:
        cut.append({"params": []})
    for owned in fragments:
        cut[group_of.get(owned.name, len(cut) - 1)]["params"].append(owned.value)
    if not shares:
        return cut, [Unreadable() for _ in cut], group_of
    shown: list[list[Any]] = [[] for _ in cut]
    for name, share in shares.items():
        if name in trained:
            shown[group_of.get(name, len(cut) - 1)].append(share)
    return cut, shown, group_of


def names_of(group: Mapping[str, Any], names: Mapping[int, str], every_name: Sequence[str], number: int) -> set[str]:
    """Resolve the ``params`` of the group of a number to names of parameters: a name, a pattern for one of
    ``every_name``, a parameter whose ``id`` is in ``names``, or several of these; pairs of a name and a parameter are
    also accepted.

    Raises:
        UsageError: ``params`` is missing, a pattern matches nothing, or a tensor is not a parameter of the model.
    """
    if "params" not in group:
        raise UsageError(f"param_groups[{number}] has no key 'params'; give names, patterns or parameters")
    params = group["params"]
    wanted = [params] if isinstance(params, str | torch.Tensor) else list(params)
    selected: set[str] = set()
    for item in wanted:
        if isinstance(item, tuple):  # torch takes (name, parameter) pairs
            item = item[1]
        if isinstance(item, torch.Tensor):
            if id(item) not in names:
                raise UsageError(f"param_groups[{number}] holds a tensor that is no parameter of the model")
            selected.add(names[id(item)])
            continue
        matches = fnmatch.filter(every_name, item)
        if not matches:
            raise UsageError(
                f"param_groups[{number}]: pattern {item!r} matches no parameter; names look like {every_name[0]!r}"
            )
        selected.update(matches)
    return selected

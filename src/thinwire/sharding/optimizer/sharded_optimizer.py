"""Any torch optimizer over this rank's share of the masters.

The optimizer sees one tensor per parameter *fragment*, so that parameter groups, per-parameter state and parameters
without a gradient behave as they do unsharded.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.agreement import NOTHING
from thinwire.collectives.group import control
from thinwire.errors import UsageError
from thinwire.sharding.grads.optimizer_shards import OwnedFragment
from thinwire.sharding.grads.optimizer_state import InnerOptimizer
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.optimizer.probes import (
    refuse_per_tensor,
    refuse_unlike_ranks,
    takes_found_inf,
    updates_in_parts,
)
from thinwire.sharding.optimizer.stock_optimizers import INNER
from thinwire.sharding.optimizer.update import ShareUpdate
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.sharding.step.step_check import StepResult
from thinwire.sharding.tensors.parameter import ShardedParameter

__all__ = ["ShardedOptimizer", "adjust", "build_optimizer", "names_of"]


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose step updates this rank's share and spreads the result.

    It shares ``param_groups`` and ``state`` with the optimizer that it wraps, so learning-rate schedulers and other
    code written for torch optimizers work with it.

    Args:
        runtime: Runtime of the model.
        inner: Optimizer over ``fragments``.
        fragments: All fragments that this rank updates.
        skip_nonfinite: Whether a step leaves parameters unchanged if the gradient norm is not finite.
        by_unit: Whether updating some parameters in one call and the rest in the next equals one update of all, so that
            units can be updated as their gradients arrive.
        loss_scale: Factor of the losses, by which a step divides the gradients; ``None`` without one.

    Attributes:
        owned: ``inner`` and ``fragments`` together, for code that needs no more of this optimizer.
        shares: Shares of the model's parameters, by name; ``None`` for a part of a larger model.
    """

    def __init__(
        self,
        runtime: Runtime,
        inner: torch.optim.Optimizer,
        fragments: Sequence[OwnedFragment],
        *,
        skip_nonfinite: bool,
        by_unit: bool,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.runtime, self.inner, self.fragments = runtime, inner, tuple(fragments)
        self.owned = InnerOptimizer(inner, self.fragments)
        self.skip_nonfinite = skip_nonfinite or loss_scale is not None
        self.reducer, self.step_check, self.shares = runtime.reducer, runtime.step_check, runtime.shares
        self.loss_scale = self.step_check.loss_scale = loss_scale
        sharded, self._lanes, self._exchanges = runtime.sharded, runtime.lanes, runtime.exchanges
        self._update = ShareUpdate(
            self.owned,
            self.reducer,
            runtime.spreads,
            runtime.programs,
            self.step_check.used,
            by_unit=by_unit,
            copies=sharded.plan.accumulate_dtype != "float32",
        )
        self._skipped_steps = 0
        self._skips_on_device = sharded.decides_on_device and takes_found_inf(inner)
        if loss_scale is not None:
            loss_scale.settle = self.step_check.settle
        self.defaults = inner.defaults
        # Optimizer.__init__ would copy the groups; the wrapped optimizer's are to be shared.
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, by fragment."""
        return self.inner.state

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because the gradient norm was not finite. The host waits for the last."""
        self.step_check.settle()
        return self._skipped_steps

    def __repr__(self) -> str:
        """The wrapped optimizer and how much of the model this rank updates."""
        elements = sum(fragment.value.numel() for fragment in self.fragments)
        return f"ShardedOptimizer({self.inner!r}, {len(self.fragments)} fragments, {elements} elements)"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Wait for the reductions, check that ranks agree, update this rank's share, and start spreading it.

        Args:
            closure: Recomputes the loss once before the update, as in torch.

        Returns:
            The closure's loss, if one is given.

        Raises:
            NonFiniteError: The gradient is not finite, and the loss scale is already at its floor. Where the host does
                not wait for the norm, the next use of the loss scale raises it.
            UsageError: There is a loss scale, and no loss was multiplied by it.
        """
        self.runtime.refuse("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.skip_nonfinite and self._skips_on_device:
            self._update_unless_found_inf()
        else:
            adjust(self.loss_scale, [self.reducer], finite=self.update())
        return loss

    def update(self) -> bool:
        """Make a step, except that the loss scale stays: it may belong to several parts of a model.

        Returns:
            Whether parameters were updated; if not, the gradient is not finite, and nothing of it is left behind.
        """
        runtime = self.runtime
        self._check_scaled()
        result = runtime.close_step(measure=self.skip_nonfinite)
        if self.skip_nonfinite and not result.finite:
            self._note_skipped()
            runtime.finish_step(updated=False)
            return False
        self._perform(result)
        return True

    def _perform(self, result: StepResult) -> None:
        """Update the share once its gradients have arrived, and end the step, which is closed."""
        runtime, inner, lanes, exchanges = self.runtime, self.inner, self._lanes, self._exchanges
        self.step_check.multiply_gradients(1.0)  # divides by the loss scale, unless clipping has
        runtime.join_spreads()
        began = lanes.mark() if lanes.recorder.timeline is not None else None
        hooked = bool(inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks)
        arrived = result.measured  # the norm is that of all gradients
        few_calls = arrived and lanes.home.exists  # which are faster on a GPU
        exchanged = exchanges is not None and exchanges.writes()  # which comes before the spread
        unspread = self._update.perform(arrived=arrived, at_once=hooked or few_calls or exchanged)
        lanes.computed("update", "of all units", began)
        runtime.finish_step(updated=True, only=unspread)

    def _update_unless_found_inf(self) -> None:
        """Make a step that the device skips if the gradient is not finite, as under torch's ``GradScaler``. The host
        learns of it later: it never waits for the norm. A skipped step spreads parameters that have not changed."""
        self._check_scaled()
        result = self.runtime.close_step(measure=True)
        norm = result.norm
        self.step_check.once_settled(self._learn)
        if self.loss_scale is not None:
            self.loss_scale.applied = False
        inner: Any = self.inner
        inner.found_inf, inner.grad_scale = (norm - norm != 0.0).float(), None
        try:
            self._perform(result)
        finally:
            del inner.found_inf, inner.grad_scale

    def _learn(self, finite: bool) -> None:
        if not finite:
            self._note_skipped()
        adjust(self.loss_scale, [self.reducer], finite=finite)

    def _note_skipped(self) -> None:
        self._skipped_steps += 1
        self.reducer.forget_lost()  # they hold what codecs rounded away from the skipped gradient

    def _check_scaled(self) -> None:
        scale = self.loss_scale
        if scale is None or scale.applied or all(part.absent for part in self.reducer.parts):
            return
        raise UsageError(
            "step(): no loss was scaled since the last step, and this step would divide its gradients by "
            f"{scale.applied_value:g}: write loss_scale.scale(loss).backward()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient. They are never memset: the next reduction overwrites them."""
        del set_to_none
        self.runtime.zero_grad()
        self._update.forget_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Refuse to make a state dict, which would hold only this rank's share."""
        raise UsageError(
            "optimizer.state_dict() would hold one rank's share only: use thinwire.save(model, optim, path)"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse to load a state dict; see :meth:`state_dict`."""
        raise UsageError("optimizer.load_state_dict() does not support shares: use thinwire.load(model, optim, path)")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group, because groups are fixed when the optimizer is made."""
        raise UsageError("parameter groups of a sharded optimizer are given to thinwire.optimizer(param_groups=...)")


def adjust(loss_scale: LossScale | None, reducers: Sequence[Reducer], *, finite: bool) -> None:
    """End a step of a loss scale, and let the rounding errors that error feedback keeps follow it.

    Args:
        loss_scale: Scale of all parts of a model; ``None`` without one.
        reducers: Reducers of this rank's parts.
        finite: Whether the gradient of the whole model was finite.

    Raises:
        NonFiniteError: It was not, and the scale is already at its floor.
    """
    if loss_scale is None:
        return
    factor = loss_scale.update(finite=finite)
    for reducer in reducers:
        reducer.rescale_lost(factor)


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
    fragments, device = sharded.fragments(), sharded.arena.device
    # Decide from the plan rather than from this rank's fragments, so that all ranks decide alike.
    cut = plan.optimizer.ranks > 1 and not (plan.partition == "inter" and plan.params.ranks == 1)
    if plan.world > 1:
        refuse_unlike_ranks(optimizer_class, options, device, cut=plan.optimizer.ranks > 1)
    if cut or sharded.part.tensor_ranks > 1:
        refuse_per_tensor(optimizer_class, options, device)
    groups = _group(sharded.units, runtime.shares or {}, fragments, list(param_groups or []))

    def refused(problems: Mapping[int, str]) -> UsageError:
        rank, text = next(iter(problems.items()))
        return UsageError(f"{optimizer_class.__name__} refuses the parameters or options of rank {rank}: {text}")

    made: list[torch.optim.Optimizer] = []

    def make() -> None:
        try:
            made.append(optimizer_class(groups, **options))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(str(error)) from error

    # If one rank cannot make the optimizer, every rank raises, so that none continues alone.
    control().agree(make, refused, NOTHING)
    (inner,) = made
    object.__setattr__(inner, INNER, True)
    by_unit = updates_in_parts(optimizer_class, options, device)
    runtime.optimizer = optimizer = ShardedOptimizer(
        runtime, inner, fragments, skip_nonfinite=skip_nonfinite, by_unit=by_unit, loss_scale=loss_scale
    )
    return optimizer


def _group(
    units: Sequence[Unit],
    shares: Mapping[str, ShardedParameter],
    fragments: Sequence[OwnedFragment],
    groups: list[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Sort fragments into parameter groups by their parameters. Parameters in no group form the last one.

    All ranks have the same groups, but a rank may own no element of a group.
    """
    names = {id(p): s.name for u in units for b in u.buffers for p, s in zip(b.parameters, b.layout.slots, strict=True)}
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
        cut[group_of.get(owned.fragment.slot.name, len(cut) - 1)]["params"].append(owned.value)
    return cut


def names_of(group: Mapping[str, Any], names: Mapping[int, str], every_name: Sequence[str], number: int) -> set[str]:
    """Resolve the ``params`` of a group to names of parameters.

    Args:
        group: Parameter group. Its ``params`` are a name, a pattern, a parameter, or several of these; pairs of a name
            and a parameter are also accepted.
        names: Names of parameters, by the ``id`` of the parameter.
        every_name: Names that patterns may match.
        number: Number of the group, for messages.

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

"""Any torch optimizer over this rank's share of the masters: clips gradients, updates the share, and spreads it.

The optimizer sees one tensor per parameter *fragment*, so that parameter groups, per-parameter state and parameters
without a gradient behave as they do unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn

import torch
from torch import nn

from thinwire.errors import NonFiniteError, UsageError
from thinwire.sharding.grads.optimizer_state import InnerOptimizer, make_state, state_of
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.grads.unit_gradient import OwnedFragment, UnitGradient
from thinwire.sharding.optimizer.probes import takes_found_inf
from thinwire.sharding.optimizer.share_update import ShareUpdate
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.sharding.step.step_check import StepResult


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    Args:
        model: A sharded model.
        max_norm: Upper bound of the norm; ``inf`` only measures.
        norm_type: Order of the norm, as in torch: 2, 1, ``inf``, ...
        error_if_nonfinite: Whether to raise an error instead of returning NaN or infinity.

    Returns:
        The norm before clipping: a 0-D fp32 tensor, equal on every rank. It stays on the device if ranks exchange
        over NCCL, so that the host waits only if it reads the norm. Otherwise it is on the CPU.

    Raises:
        UsageError: ``max_norm`` is no number. Or ``norm_type`` is not 2, and the model is cut by tensor or pipeline
            parallelism.
        NonFiniteError: The norm is not finite, and ``error_if_nonfinite`` is true.
        MismatchError: Ranks ran different steps.
    """
    runtime = runtime_of(model)
    if norm_type == 2.0:
        norm = runtime.close_step(measure=True).norm
    elif (gradients := runtime.gradients) is None:
        raise UsageError(f"norm_type = {norm_type}: with tp or pp only the 2-norm is available; use norm_type = 2")
    else:
        runtime.close_step()
        norm = gradients.norm(float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteError(f"the gradient norm is {float(norm)}; lower the learning rate or look at the data")
    runtime.clip_gradients(norm.double(), max_norm)
    return norm.float()


class ShareOptimizer(torch.optim.Optimizer):
    """An optimizer of which this rank has a share; it refuses what torch would answer for that share only. Subclasses
    take over the groups of others, and call no constructor of torch, which would copy them."""

    def state_dict(self) -> dict[str, Any]:
        """Refuse to make a state dict, which would hold only this rank's share."""
        raise UsageError(
            "optimizer.state_dict() would hold one rank's share only: use thinwire.save(model, optim, path), or "
            "model.save(optim, path) after thinwire.parallelize"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse to load a state dict; see :meth:`state_dict`."""
        raise UsageError(
            "optimizer.load_state_dict() does not support shares: use thinwire.load(model, optim, path), or "
            "model.load(optim, path) after thinwire.parallelize"
        )

    def _refuse_hook(self, hook: Callable[..., Any], prepend: bool = False) -> NoReturn:
        """Refuse hooks of state dicts."""
        raise UsageError(
            "hooks of an optimizer's state dict: shares are saved without one; save further values with "
            "thinwire.save(model, optim, path, extra=...)"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled: the copy would update no model."""
        raise UsageError(
            f"{type(self).__name__} updates one model and cannot be copied or pickled: copy the model, and make an "
            "optimizer of the copy; save both with thinwire.save(model, optim, path)"
        )


class ShardedOptimizer(ShareOptimizer):
    """A torch optimizer whose step updates this rank's share and spreads the result.

    It shares ``param_groups`` and ``state`` with the optimizer that it wraps, so learning-rate schedulers and other
    code written for torch optimizers work with it.

    Args:
        runtime: Runtime of the model.
        inner: Optimizer over this rank's fragments.
        skip_nonfinite: Whether a step leaves parameters unchanged if the gradient norm is not finite.
        by_unit: Whether updating some parameters in one call and the rest in the next equals one update of all, so that
            units can be updated as their gradients arrive.
        try_groups: Refuses groups with options that the update of shares does not support; returns their ``by_unit``.
        loss_scale: Factor of the losses, by which a step divides the gradients; ``None`` without one.
        group_of: Numbers of the groups that were given for parameters, by name.
        rest: Number of the group of all others; ``None`` if there is none.

    Attributes:
        inner: The wrapped optimizer.
        owned: Both together, for code that needs no more of this optimizer.
        shares: Shares of the model's parameters, by name; ``None`` for a part of a larger model.
        given_names: Names of the parameters of each group in the order of the optimizer in whose place this one was
            made; of none without one, or of fewer groups than there are by now.
    """

    given_names: Sequence[Sequence[str]] = ()

    def __init__(
        self,
        runtime: Runtime,
        inner: InnerOptimizer,
        *,
        skip_nonfinite: bool,
        by_unit: bool,
        try_groups: Callable[[Sequence[Mapping[str, Any]]], bool],
        loss_scale: LossScale | None = None,
        group_of: Mapping[str, int] | None = None,
        rest: int | None = None,
    ) -> None:
        self.runtime, self.owned = runtime, inner
        self.inner, self._group_of = inner.optimizer, group_of or {}
        self._try_groups = try_groups
        # Number of the group of all parameters for which none was given, or of one that has the defaults as well.
        self._rest = self._group_like_it() if rest is None else rest
        # Unfrozen parameters that are in no group yet, with the gradients of their buffers, and this rank's fragments.
        self._expected: dict[str, tuple[UnitGradient, list[OwnedFragment]]] = {}
        self.skip_nonfinite = skip_nonfinite or loss_scale is not None
        self.reducer, self.step_check, self.shares = runtime.reducer, runtime.step_check, runtime.shares
        self.loss_scale = self.step_check.loss_scale = loss_scale
        sharded = runtime.sharded
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
        on_device = sharded.decides_on_device and sharded.plan.residence.optimizer != "host-update"
        self._skips_on_device = on_device and takes_found_inf(self.inner)
        if loss_scale is not None:
            loss_scale.await_update = self.step_check.read_norms
        self.defaults = self.inner.defaults
        # Optimizer.__init__ would copy the groups; the wrapped optimizer's are to be shared.
        self._optimizer_step_pre_hooks = self.inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = self.inner._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups. Their ``params`` are the model's parameters, as ``model.parameters()`` gives
        them."""
        if self._expected and not all(part.absent for part, _ in self._expected.values()):
            self._take_expected(list(self._expected))
        return self.inner.param_groups

    @property
    def group_numbers(self) -> dict[str, int]:
        """The number of a parameter's group, by the parameter's name, for those of which this rank has a fragment."""
        names = {id(owned.value): owned.name for owned in self.fragments}
        with self.owned.over_fragments() as inner:
            return {names[id(value)]: n for n, group in enumerate(inner.param_groups) for value in group["params"]}

    @property
    def fragments(self) -> Sequence[OwnedFragment]:
        """All fragments of this rank, with those of unfrozen parameters that are in no group yet."""
        return self.runtime.sharded.fragments

    def expect(self, parts: Sequence[UnitGradient], owned: Iterable[OwnedFragment]) -> None:
        """Expect parameters that were frozen, and are trained now: in a group that is added before they have gradients,
        or else in the group that ``param_groups`` gave them, or one with the defaults. Given are the gradients of their
        buffers, and this rank's fragments of them."""
        self._expected |= {slot.name: (part, []) for part in parts for slot in part.layout.slots}
        for one in owned:
            self._expected[one.name][1].append(one)

    def _take_expected(self, names: Iterable[str], number: int | None = None) -> None:
        """Put unfrozen parameters into a group; by default, each into its own.

        Raises:
            UsageError: One has none, and a scheduler would not know a new one.
        """
        for name in names:
            assert self.shares is not None
            chosen = self._group_of.get(name, self._rest) if number is None else number
            if chosen is None:
                if any("initial_lr" in group for group in self.inner.param_groups):
                    if not self.shares[name].requires_grad:  # it only shares a buffer, or is written to
                        continue
                    raise UsageError(
                        f"{name} was frozen when the optimizer was made, no parameter group is its own or has the "
                        "defaults, and the learning-rate scheduler could not set the rate of a new one: give it a "
                        "group with the others, as param_groups takes frozen parameters too; or freeze it after the "
                        "optimizer is made"
                    )
                chosen = self._rest = self.owned.add_group({})
            _, owned = self._expected.pop(name)
            self.owned.take(chosen, owned, [self.shares[name]])
            self._update.take(owned)

    def _group_like_it(self) -> int | None:
        """The number of the first group that has all the defaults, but for what schedulers have set."""
        for number, group in enumerate(self.inner.param_groups):
            options = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            if all(options.get(key) == value for key, value in self.inner.defaults.items()):
                return number
        return None

    @property
    def kind(self) -> str:
        """Name of the wrapped optimizer's class."""
        return type(self.inner).__name__

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, by fragment."""
        if self.owned.host is not None:
            self.owned.host.settle()
        return self.inner.state

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because the gradient norm was not finite. The host waits for the last."""
        self.step_check.read_norms()
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
            finite = self.update()
            if self.loss_scale is not None:
                adjust(self.loss_scale, [self.reducer], finite=finite)
        return loss

    def update(self) -> bool:
        """Make a step, except that the loss scale stays: it may belong to several parts of a model.

        Returns:
            Whether parameters were updated; if not, the gradient is not finite, and nothing of it is left behind.
        """
        runtime = self.runtime
        self._check()
        result = runtime.close_step(measure=self.skip_nonfinite)
        if self.skip_nonfinite and not result.finite:
            self._note_skipped()
            runtime.finish_step(updated=False)
            return False
        self._perform(result)
        return True

    def _perform(self, result: StepResult) -> None:
        """Update the share once its gradients have arrived, and end the step, which is closed."""
        runtime, inner = self.runtime, self.inner
        lanes, exchanges = runtime.lanes, runtime.exchanges
        self.step_check.multiply_gradients(1.0)  # divides by the loss scale, unless clipping has
        runtime.join_spreads(settle=False)
        began = lanes.recorder.mark() if lanes.recorder.timeline is not None else None
        hooked = bool(inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks)
        arrived = result.measured  # the norm is that of all gradients
        few_calls = arrived and lanes.home.exists  # which are faster on a GPU
        exchanged = exchanges is not None and exchanges.writes()  # which comes before the spread
        host = self.owned.host
        if host is None:
            unspread = self._update.perform(arrived=arrived, at_once=hooked or few_calls or exchanged)
        else:
            unspread = self._update.in_batches(host, at_once=hooked, spreads=not exchanged)
        if began is not None:
            lanes.recorder.computed("update of all units", began)
        runtime.finish_step(updated=True, only=unspread)

    def _update_unless_found_inf(self) -> None:
        """Make a step that the device skips if the gradient is not finite, as under torch's ``GradScaler``. The host
        learns of it later: it never waits for the norm. A skipped step spreads parameters that have not changed."""
        self._check()
        result = self.runtime.close_step(measure=True)
        norm = result.norm
        self.step_check.once_norm_is_read(self._learn)
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
        if self.loss_scale is not None:
            adjust(self.loss_scale, [self.reducer], finite=finite)

    def _note_skipped(self) -> None:
        self._skipped_steps += 1
        self.reducer.forget_lost()  # they hold what codecs rounded away from the skipped gradient

    def _check(self) -> None:
        """Refuse a step that would train less than the whole model, or divide gradients that were never multiplied, and
        a step beside another optimizer of the model."""
        if self.runtime.optimizer is not self:
            raise UsageError(
                f"{self.kind}.step(): thinwire.optimizer(...) has made another optimizer for this model since, which "
                "updates all of it. For several, make torch's own from the parameters of each part, as in "
                f"{self.kind}(model.encoder.parameters()); or give one optimizer several param_groups"
            )
        if self.runtime.masters is not None:
            self.runtime.masters.check_all_managed()
        if self._expected:
            self._take_expected(list(self._expected))
        scale = self.loss_scale
        if scale is None or scale.applied or all(part.absent for part in self.reducer.parts):
            return
        raise UsageError(
            "step(): no loss was scaled since the last step, and this step would divide its gradients by "
            f"{scale.applied_value:g}: write loss_scale.scale(loss).backward()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient. They are never memset: the next reduction overwrites them.

        Args:
            set_to_none: If false, gradients become zero, as in torch: a step without a backward then updates
                parameters by momentum. Under tp or pp they are forgotten all the same.
        """
        if not set_to_none and self.shares is not None:
            for share in self.shares.values():
                if (grad := share.grad) is not None:
                    grad.zero_()
            return
        self.runtime.zero_grad()
        self._update.forget_gradients()

    def state_of(self, owned: OwnedFragment) -> dict[str, Any]:
        """What the optimizer keeps for a fragment."""
        return state_of(self.owned, owned)

    def make_state(self, names: Set[str]) -> list[OwnedFragment]:
        """Allocate missing state, also of the parameters with these names, which are known to be trained; returns the
        fragments that had none."""
        self._take_expected(names & self._expected.keys())
        return make_state(self.owned)

    def take(self) -> None:
        """Nothing: states are loaded into the wrapped optimizer's own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that were frozen when the model was sharded, and are to be trained now.

        Args:
            param_group: As in torch; ``params`` are parameters of the model.

        Raises:
            UsageError: Others are given, which have groups since the optimizer was made.
        """
        params = param_group["params"]
        given = {id(one) for one in ([params] if isinstance(params, torch.Tensor) else params)}
        names = [name for name, share in (self.shares or {}).items() if id(share) in given]
        if not names or len(names) < len(given) or not self._expected.keys() >= set(names):
            raise UsageError(
                "add_param_group() takes parameters that were frozen when the model was sharded, after their "
                "requires_grad = True and before their first gradient; groups of others are given to "
                "thinwire.optimizer(param_groups=...)"
            )
        self._update.by_unit &= self._try_groups([param_group])
        self._take_expected(names, self.owned.add_group(param_group))


def adjust(loss_scale: LossScale, reducers: Sequence[Reducer], *, finite: bool) -> None:
    """End a step of the loss scale of all parts of a model, whose gradient was ``finite`` or not, and let the rounding
    errors that error feedback keeps in this rank's reducers follow it.

    Raises:
        NonFiniteError: It was not, and the scale is already at its floor.
    """
    factor = loss_scale.update(finite=finite)
    for reducer in reducers:
        reducer.rescale_lost(factor)

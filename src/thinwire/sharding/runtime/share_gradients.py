"""The combined gradients of a model, as code outside of its forward and backward reads and writes them.

Reductions continue until a gradient is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from thinwire.errors import UsageError
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.sharding.step.passes import Passes
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.step.step_check import StepCheck
from thinwire.sharding.tensors.operations import from_power_sums, power_sum
from thinwire.sharding.tensors.parameter import ShardedParameter

__all__ = ["GradientNorms", "ShareGradients", "TrainedParameter"]


@dataclass(eq=False)
class TrainedParameter:
    """A trained parameter's place in the runtime.

    Attributes:
        unit: Number of the parameter's unit.
        slot: Number of the parameter among the unit's trained ones.
        part: Gradient of the flat buffer that holds the parameter.
        index: Number of the parameter in that buffer.
        owned: Elements of ``part.owned`` that belong to the parameter.
        shard: Elements of this rank's P shard that belong to it.
    """

    unit: int
    slot: int
    part: UnitGradient
    index: int
    owned: slice
    shard: slice


class GradientNorms:
    """Caches the norms of all gradients of a model. Each order of norm needs one exchange.

    Attributes:
        shares: Parameters of the model that are trained.
    """

    def __init__(self) -> None:
        self.shares: list[ShardedParameter] = []
        self._norms: dict[float, dict[str, torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop all norms, because a gradient has changed."""
        if self._norms:
            self._norms = {}

    def by_parameter(self, order: float) -> dict[str, torch.Tensor]:
        """Norms by the names of parameters that have gradients; fp32, 0-D. Collective."""
        if order not in self._norms:
            grads = {share.spec.name: share.grad for share in self.shares}
            present = {name: grad for name, grad in grads.items() if grad is not None}
            partial = torch.stack([power_sum(grad.piece, order) for grad in present.values()])
            first = self.shares[0]
            norms = from_power_sums(first.spec.holders.combined(partial), order).float().to(first.device)
            self._norms[order] = dict(zip(present, norms, strict=True))
        return self._norms[order]

    def total(self, order: float) -> torch.Tensor:
        """Norm of the whole gradient, fp32, 0-D. Collective."""
        if not any(share.grad is not None for share in self.shares):
            return torch.tensor(0.0)
        norms = torch.stack(list(self.by_parameter(order).values()))
        total: torch.Tensor = torch.linalg.vector_norm(norms, order)
        return total


class ShareGradients:
    """The gradients of one model's shares.

    Args:
        sharded: The model.
        passes: Its passes.
        reducer: Reduces its gradients.
        step_check: Exchanges of its steps.
        close_step: See :meth:`thinwire.sharding.runtime.runtime.Runtime.close_step`.

    Attributes:
        norms: Norms of the gradients, cached until a gradient changes.
        hooks: Trained shares, each with the hooks that wait for its combined gradient.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        passes: Passes,
        reducer: Reducer,
        step_check: StepCheck,
        close_step: Callable[[], object],
    ) -> None:
        self._passes, self._reducer, self._step_check, self._close_step = passes, reducer, step_check, close_step
        plan, self._on_device = sharded.plan, sharded.decides_on_device
        self._copies = 1 if plan.grad_reduce == "mean" else plan.world  # of a gradient that every rank has, in a sum
        self._added: list[tuple[TrainedParameter, torch.Tensor]] = []  # of operations on shares, not merged yet
        self.norms = GradientNorms()
        self.hooks: list[tuple[ShardedParameter, Mapping[int, Callable[[torch.Tensor], None]]]] = []

    def after_backward(self) -> None:
        """Call the hooks that wait for combined gradients, after the step's last backward."""
        self.norms.forget()
        for share, hooks in self.hooks:
            if hooks and share.grad is not None:
                for hook in list(hooks.values()):
                    hook(share)

    def norm(self, order: float) -> torch.Tensor:
        """Norm of the whole gradient without the loss scale; fp32, 0-D; on the device if ranks decide there, else on
        the CPU. Collective, after the step was closed."""
        norm = self.norms.total(order) / self._step_check.gradient_scale
        return norm if self._on_device else norm.cpu()

    def exists(self, trained: TrainedParameter) -> bool:
        """Whether a parameter has a gradient on any rank. Collective, once after the step's last backward."""
        if self._passes.may_be_unreported:
            self._passes.take_unreported()
        if self.is_absent(trained):
            return False
        if trained.part.unsynced:
            return True
        if not self._step_check.used.is_known():
            self._close_step()
        return self._step_check.used.is_used(trained.unit, trained.slot)

    def is_absent(self, trained: TrainedParameter) -> bool:
        """Whether nothing at all has come for the parameter's buffer on this rank."""
        return trained.part.absent and not self._added

    def piece(self, trained: TrainedParameter, name: str) -> torch.Tensor:
        """Wait for the combined gradient and return this rank's share of it, 1-D.

        Args:
            trained: Place of the parameter.
            name: Name of the parameter, for messages.

        Raises:
            UsageError: The backward of the step's last micro-batch has not run.
        """
        if trained.part.unsynced:
            raise UsageError(
                f"the gradient of {name} is read before the step's last backward: ranks combine "
                "gradients in the last of thinwire.micro_batches(...). Read it after that backward, or call "
                "zero_grad() to drop it"
            )
        self.merge()
        self._reducer.join_unit(trained.unit)
        return trained.part.owned.values[trained.owned]

    def replace(self, trained: TrainedParameter, piece: torch.Tensor) -> None:
        """Set this rank's share of a gradient."""
        piece = piece.clone()
        self._reducer.join_unit(trained.unit)
        if not trained.part.owned.empty:
            trained.part.owned.values[trained.owned].zero_()
        trained.part.add(trained.owned, piece)

    def note_set(self, trained: TrainedParameter) -> None:
        """Record that a parameter was given a gradient; called alike on every rank."""
        self._step_check.set_used(trained.unit, trained.slot, used=True)
        self.changed()

    def forget(self, trained: TrainedParameter) -> None:
        """Drop the gradient of a parameter; called alike on every rank."""
        self.merge()
        self._reducer.join_unit(trained.unit)
        trained.part.forget(trained.index, trained.owned, trained.shard)
        self._step_check.set_used(trained.unit, trained.slot, used=False)
        self.changed()

    def changed(self) -> None:
        """Drop the norms, which are stale after a change of gradients."""
        self.norms.forget()
        self._step_check.forget_norm()

    def overflowed(self) -> None:
        """Take note that a gradient scaler has found gradients that are not finite and skips the step: next gradients
        must not contain what codecs have rounded away from these."""
        self._reducer.forget_lost()

    # -- gradients of operations on shares ---------------------------------------------------------------------

    def add(self, trained: TrainedParameter, piece: torch.Tensor) -> None:
        """Take this rank's share, 1-D, of a gradient from an operation on shares; :meth:`merge` adds it."""
        self._step_check.begin_backward()
        self._step_check.used.note(trained.unit, trained.slot)
        self.norms.forget()
        self._added.append((trained, piece))

    def merge(self) -> None:
        """Add the gradients of operations on shares to the combined gradients."""
        added, self._added = self._added, []
        for trained, piece in added:
            self._reducer.join_unit(trained.unit)
            trained.part.add(trained.owned, piece * self._copies if self._copies > 1 else piece)

    def drop_added(self) -> None:
        """Forget the gradients of operations on shares."""
        self._added.clear()
        self.norms.forget()

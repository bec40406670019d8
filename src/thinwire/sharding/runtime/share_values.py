"""The masters of a model and their combined gradients, as code outside of its passes reads and writes them.

A write to a master marks its unit. Before anything computes with the unit again, the new masters are cast into its P
shard and spread. Reductions continue until a gradient is read.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.modules.quantized import is_wrapper
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.sharding.step.passes import Passes
from thinwire.sharding.step.pinned_units import Holds, recomputing
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.step.step_check import StepCheck
from thinwire.sharding.tensors.operations import from_power_sums, power_sum
from thinwire.sharding.tensors.tensor import ShareTensor

Share = Any
"""The share of a parameter; its class depends on this module."""


class Masters:
    """The masters of one model, as code outside of its passes writes them.

    Attributes:
        reading: See :meth:`thinwire.sharding.step.passes.Passes.reading`.
        unfreeze: See :func:`thinwire.sharding.unfreezing.unfreeze`.
        widen: See :func:`thinwire.sharding.unfreezing.widen`.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        passes: Passes,
        spreads: Spreads,
        holds: Holds,
        finish_step: Callable[..., None],
    ) -> None:
        self.sharded, self.reading = sharded, passes.reading
        self._spreads, self._holds, self._finish_step = spreads, holds, finish_step
        # By unit, the identities of the parameters whose masters were written since the unit was last spread.
        self._dirty: dict[int, set[int]] = {}
        self._wanted: set[str] = set()
        self.unfreeze: Callable[[Set[str]], None] = lambda _: None
        self.widen: Callable[[Set[str]], None] = lambda _: None
        self._updated_in_hooks: bool | None = None  # None outside of collecting_updates
        # The tables of the model's modules, and what they held when all trainable parameters were last managed, kept
        # so that nothing new has the identity of what is gone.
        self._tables: list[dict[str, Any]] = []
        self._held: list[Any] = []

    def before_write(self) -> None:
        """Prepare for a write to masters: wait for the spreads that read them.

        Raises:
            UsageError: A ``full_parameters()`` block is open.
        """
        self._holds.refuse("a write to a share of a parameter")
        self._spreads.join()

    def written(self, unit: int, parameter: nn.Parameter) -> None:
        """Note that the masters of a unit's parameter have new values. The share stands for what is kept of a whole one
        until they are spread."""
        if unit not in self._dirty and not self.sharded.units[unit].sharded:
            self.sharded.units[unit].await_values()
        self._dirty.setdefault(unit, set()).add(id(parameter))

    def flush(self) -> None:
        """Spread the units that were written since the last step. Collective, if any was written."""
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        spreads = self._spreads
        spreads.join()
        spreads.write_back(sorted(dirty), differences=True, only=dirty)
        spreads.start(exactly=True, only=dirty.keys())
        self._settle(dirty)

    def _settle(self, units: Iterable[int]) -> None:
        for index in units:
            self.sharded.units[index].settle()

    @contextlib.contextmanager
    def collecting_updates(self) -> Iterator[None]:
        """Let optimizers step inside a backward, from hooks on combined gradients. All their updates are one step."""
        self._updated_in_hooks = False
        try:
            yield
        finally:
            updated, self._updated_in_hooks = self._updated_in_hooks, None
        if updated:
            self.finish_update()

    def begin_update(self, action: str) -> None:
        """Prepare for a step of one of torch's own optimizers.

        Raises:
            UsageError: A backward is running that has not combined its gradients, or a ``full_parameters()`` block is
                open.
        """
        if self._updated_in_hooks is None and recomputing():
            raise UsageError(
                f"{action} inside a backward, as an optimizer in a hook would: gradients are combined when the "
                "backward has ended. Use thinwire.optimizer(...), which updates each unit as its gradients arrive"
            )
        self._holds.refuse(action)

    def finish_update(self) -> None:
        """Spread the shares that one of torch's own optimizers has updated, and begin the next step."""
        if self._updated_in_hooks is not None:
            self._updated_in_hooks = True
            return
        dirty, self._dirty = self._dirty, {}
        self._spreads.write_back(sorted(dirty), only=dirty)
        self._finish_step(updated=bool(dirty), only=dirty.keys())
        self._settle(dirty)

    def want(self, name: str, *, wanted: bool) -> None:
        """Note whether a parameter that has no master is to be trained. It then gets one, but under ``no_grad`` only
        before gradients flow: that may be for a while, as for the reference adapter of peft."""
        (self._wanted.add if wanted else self._wanted.discard)(name)
        self.train_wanted()

    def follow_settings(self) -> None:
        """Do what :meth:`want` does for parameters whose ``requires_grad`` was set while they were whole."""
        for unit in self.sharded.units:
            for buffer in unit.buffers if not self._holds.depth else ():
                for slot, compute in buffer.named:
                    if compute.requires_grad and not buffer.layout.trainable:
                        self._wanted.add(slot.name)
        self.train_wanted()

    def train_wanted(self) -> None:
        """Give masters to the parameters of :meth:`want`. Collective, if there are any."""
        if self._wanted and torch.is_grad_enabled():
            wanted, self._wanted = self._wanted, set()
            self.unfreeze(wanted)

    def check_all_managed(self) -> None:
        """Check that every trainable parameter of the model existed when the model was sharded.

        Raises:
            UsageError: A parameter was added later; the error names it.
        """
        model = self.sharded.model
        # Without a walk over modules, which takes milliseconds where there are thousands.
        present = _values(self._tables)
        if present and len(present) == len(self._held) and all(map(operator.is_, present, self._held)):
            return
        # Inside of a backward, modules list the tensors that they compute with instead of shares.
        computing = {id(p) for unit in self.sharded.units for buffer in unit.buffers for p in buffer.parameters}
        for name, parameter in model.named_parameters():
            managed = _is_share(parameter) or id(parameter) in computing or is_ignored(parameter)
            if parameter.requires_grad and not managed:
                if is_wrapper(parameter):
                    raise UsageError(
                        f"{name} is a {type(parameter).__name__} that is to be trained, and plain tensors are trained: "
                        "freeze it with requires_grad_(False) and train adapters beside it, or dequantize it before "
                        "thinwire.shard"
                    )
                raise UsageError(
                    f"{name} was added after thinwire.shard: ranks would not combine its gradients. Add it before, or "
                    "freeze it, or exclude it with thinwire.ignore(parameter)"
                )
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._tables = [*(module._modules for module in modules), *(module._parameters for module in modules)]
        self._held = _values(self._tables)


def _is_share(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, ShareTensor) and parameter.live is not None and parameter.live.is_own(parameter)


def _values(tables: Sequence[dict[str, Any]]) -> list[Any]:
    """The values of modules' tables. Those of parameters store what modules compute with."""
    return list(itertools.chain.from_iterable(map(dict.values, tables)))


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


class ShareGradients:
    """The gradients of one model's shares.

    Attributes:
        shares: Trained shares, each with the hooks that wait for its combined gradient.
        parting: What to call before gradients are dropped that have been handed out.
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
        self.parting: set[Callable[[], None]] = set()
        self.shares: list[tuple[Share, Mapping[int, Callable[[torch.Tensor], None]]]] = []
        self._norms: dict[float, dict[str, torch.Tensor]] = {}  # by order and name, until a gradient changes

    def after_backward(self) -> None:
        """Call the hooks that wait for combined gradients, after the step's last backward."""
        self.forget_norms()
        for share, hooks in self.shares:
            if hooks and share.grad is not None:
                for hook in list(hooks.values()):
                    hook(share)

    def norm(self, order: float) -> torch.Tensor:
        """Norm of the whole gradient without the loss scale; fp32, 0-D; on the device if ranks decide there, else on
        the CPU. Collective, after the step was closed."""
        total = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        if any(share.grad is not None for share, _ in self.shares):
            total = torch.linalg.vector_norm(torch.stack(list(self.norms(order).values())), order)
        norm = total / self._step_check.gradient_scale
        return norm if self._on_device else norm.cpu()

    def norms(self, order: float) -> dict[str, torch.Tensor]:
        """Norms by the names of parameters that have gradients; fp32, 0-D. Collective, in one exchange."""
        if order not in self._norms:
            grads = {share.spec.name: share.grad for share, _ in self.shares}
            present = {name: grad for name, grad in grads.items() if grad is not None}
            partial = torch.stack([power_sum(grad.piece, order) for grad in present.values()])
            first, _ = self.shares[0]
            norms = from_power_sums(first.spec.holders.combined(partial), order).float().to(first.device)
            self._norms[order] = dict(zip(present, norms, strict=True))
        return self._norms[order]

    def forget_norms(self) -> None:
        """Drop the norms, because a gradient has changed."""
        self._norms.clear()

    def exists(self, trained: TrainedParameter) -> bool:
        """Whether a parameter has a gradient on any rank. Collective, once after the step's last backward."""
        self._passes.forget_failed()
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
        """Wait for the combined gradient of the parameter with this name and return this rank's share of it, 1-D.

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
        return trained.part.owned.kept[trained.owned]

    def replace(self, trained: TrainedParameter, piece: torch.Tensor) -> None:
        """Set this rank's share of a gradient."""
        piece = piece.clone()
        self._reducer.join_unit(trained.unit)
        if not trained.part.owned.empty:
            trained.part.owned.kept[trained.owned].zero_()
        trained.part.add(trained.index, trained.owned, piece)

    def note_set(self, trained: TrainedParameter) -> None:
        """Record that a parameter was given a gradient; called alike on every rank."""
        self._step_check.used.set(trained.unit, trained.slot, used=True)
        self.changed()

    def forget(self, trained: TrainedParameter) -> None:
        """Drop the gradient of a parameter; called alike on every rank."""
        self.merge()
        self._reducer.join_unit(trained.unit)
        trained.part.forget(trained.index, trained.owned, trained.shard)
        self._step_check.used.set(trained.unit, trained.slot, used=False)
        self.changed()

    def changed(self) -> None:
        """Drop all norms, which are stale after a change of gradients."""
        self.forget_norms()
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
        self.forget_norms()
        self._added.append((trained, piece))

    def merge(self) -> None:
        """Add the gradients of operations on shares to the combined gradients."""
        added, self._added = self._added, []
        for trained, piece in added:
            self._reducer.join_unit(trained.unit)
            trained.part.add(trained.index, trained.owned, piece * self._copies if self._copies > 1 else piece)

    def drop(self) -> None:
        """Forget the gradients of operations on shares, and part with those that were handed out."""
        for part in self.parting:
            part()
        self.parting.clear()
        self._added.clear()
        self.forget_norms()

"""The parameters of a model outside of its forward and backward: shares of the masters, with their gradients.

Reads and writes of share tensors end here. A write marks its unit. Before anything computes with the unit again, the
new masters are cast into its P shard and spread. Reductions continue until a gradient is read.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError
from thinwire.program import Axis, Lane
from thinwire.sharding.grads.optimizer_shards import OwnedFragment
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.params.gathers import FlatBuffer
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.runtime.tensor_collectives import ModelHolders
from thinwire.sharding.step.forward import Passes
from thinwire.sharding.step.param_broadcast import Spreads
from thinwire.sharding.step.pinned_units import Holds, recomputing
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.step.step_check import Agreement, Agreements
from thinwire.sharding.tensors.operations import from_power_sums, power_sum
from thinwire.sharding.tensors.parameter import GradientHook, ShardedParameter
from thinwire.sharding.tensors.spec import ShareSpec
from thinwire.sharding.tensors.tensor import ShareTensor

__all__ = ["ModelParameter", "Outside", "forget_share", "refuse_in_backward", "sharded_parameter_of"]

_MANAGED = "_thinwire_share"
"""Attribute of a compute tensor that holds its share, which replaces it outside of passes."""


_TORCHS_GRAD: Any = torch.Tensor.grad
"""torch's own ``grad`` of a share, which autograd fills in the backward of operations on shares."""


def sharded_parameter_of(compute: torch.Tensor) -> ShardedParameter | None:
    """The share of a parameter that a module computes with; ``None`` if the parameter is not sharded."""
    share: ShardedParameter | None = getattr(compute, _MANAGED, None)
    return share


def forget_share(compute: torch.Tensor) -> None:
    """Remove the share of a parameter that is no longer sharded."""
    object.__delattr__(compute, _MANAGED)


@dataclass(eq=False)
class Trained:
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


@dataclass(eq=False)
class Outside:
    """The parameters of one model, as share tensors.

    Attributes:
        sharded: The model.
        passes: Receives the events of its passes.
        reducer: Reduces its gradients.
        agreements: Exchanges of its steps.
        spreads: Spreads its updated parameters.
        holds: Keeps its gathered parameters that may still be read.
        agree: See :meth:`thinwire.sharding.runtime.runtime.Runtime.agree`.
        finish_step: See :meth:`thinwire.sharding.runtime.runtime.Runtime.finish_step`.
        parameters: Share of each parameter, by name, in the order of units.
        dirty: Numbers of units whose masters were written since they were last spread.
        norms: Norms of the gradients, cached until a gradient changes.
    """

    sharded: ShardedModel
    passes: Passes
    reducer: Reducer
    agreements: Agreements
    spreads: Spreads
    holds: Holds
    agree: Callable[..., Agreement]
    finish_step: Callable[..., None]
    parameters: dict[str, ShardedParameter] = field(default_factory=dict)
    dirty: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._live: list[ModelParameter] = []
        self._added: list[tuple[Trained, torch.Tensor]] = []  # gradients of operations on shares, not merged yet
        self._checked = 0  # number of the model's table entries at the last check that all of them are managed
        self.norms = GradientNorms(self._live)
        spans: dict[str, tuple[int, int]] = {}
        sharded = self.sharded
        trained = ModelHolders(sharded, spans, trained=True)
        frozen = ModelHolders(sharded, spans, trained=False)
        fragments = {owned.fragment.slot.name: owned for owned in sharded.fragments()}
        for unit in self.sharded.units:
            parts = iter(sharded.gradients.get(unit.index, ()))
            for buffer in unit.buffers:
                if buffer.layout.trainable:
                    self._place_trained(unit, buffer, next(parts), fragments, trained, spans)
                else:
                    self._place_frozen(unit, buffer, frozen, spans)

    # -- making shares -----------------------------------------------------------------------------------------

    def _place_trained(
        self,
        unit: Unit,
        buffer: FlatBuffer,
        part: UnitGradient,
        fragments: dict[str, OwnedFragment],
        holders: ModelHolders,
        spans: dict[str, tuple[int, int]],
    ) -> None:
        shard = self.sharded.axes[Axis.PARAMS, Lane.REDUCE].index
        of_shard = {slot.name: run for slot, _, run in buffer.layout.pieces(shard)}
        masters = buffer.shard if buffer.master is None else buffer.master
        first = int(part.owned.values.storage_offset())
        for index, (slot, compute) in enumerate(zip(buffer.layout.slots, buffer.parameters, strict=True)):
            owned = fragments.get(slot.name)
            if owned is None:
                piece, offset, mine = masters[:0].detach(), 0, slice(0, 0)
            else:
                piece, offset = owned.value.detach().reshape(-1), owned.fragment.offset
                begin = int(owned.grad.storage_offset()) - first
                mine = slice(begin, begin + owned.fragment.length)
            run = of_shard.get(slot.name)
            in_shard = slice(run.start, run.start + run.length) if run is not None else slice(0, 0)
            trained = Trained(unit.index, part.first_slot + index, part, index, mine, in_shard)
            spans[slot.name] = (offset, piece.numel())
            spec = ShareSpec(slot.name, slot.shape, offset, piece.numel(), holders)
            self._add(ModelParameter(self, unit, compute, trained), piece, spec, requires_grad=True)

    def _place_frozen(
        self, unit: Unit, buffer: FlatBuffer, holders: ModelHolders, spans: dict[str, tuple[int, int]]
    ) -> None:
        pieces = {
            slot.name: (offset, run)
            for slot, offset, run in buffer.layout.pieces(self.sharded.axes[Axis.PARAMS, Lane.REDUCE].index)
        }
        for slot, compute in zip(buffer.layout.slots, buffer.parameters, strict=True):
            offset, run = pieces.get(slot.name, (0, None))
            piece = buffer.shard[run.start : run.start + run.length] if run is not None else buffer.shard[:0]
            spans[slot.name] = (offset, piece.numel())
            spec = ShareSpec(slot.name, slot.shape, offset, piece.numel(), holders)
            self._add(ModelParameter(self, unit, compute, None), piece.detach(), spec, requires_grad=False)

    def _add(self, live: ModelParameter, piece: torch.Tensor, spec: ShareSpec, *, requires_grad: bool) -> None:
        share = ShardedParameter(piece, spec, live, requires_grad=requires_grad)
        live.share = share
        if requires_grad:
            torch.Tensor.register_post_accumulate_grad_hook(share, _accumulation_hook(live))
        self.parameters[spec.name] = share
        self._live.append(live)
        object.__setattr__(live.compute_tensor, _MANAGED, share)

    # -- writes ------------------------------------------------------------------------------------------------

    def before_write(self) -> None:
        """Prepare for a write to masters: wait for the spreads that read them.

        Raises:
            UsageError: A ``full_parameters()`` block is open.
        """
        self.holds.refuse("a write to a share of a parameter")
        self.spreads.join()

    def flush(self) -> None:
        """Spread the units that were written since the last step. Collective, if any was written."""
        if not self.dirty:
            return
        dirty, self.dirty = frozenset(self.dirty), set()
        spreads = self.spreads
        spreads.join()
        spreads.write_back(sorted(dirty), differences=True)
        spreads.start(exactly=True, only=dirty)

    def finish_update(self) -> None:
        """Spread the shares that one of torch's own optimizers has updated, and begin the next step."""
        dirty, self.dirty = frozenset(self.dirty), set()
        self.spreads.write_back(sorted(dirty))
        self.finish_step(updated=bool(dirty), only=dirty)

    def check_all_managed(self) -> None:
        """Check that every trainable parameter of the model existed when the model was sharded.

        Raises:
            UsageError: A parameter was added later; the error names it.
        """
        model = self.sharded.model
        count = sum(len(module._parameters) for module in model.modules())
        if count == self._checked:
            return
        for name, parameter in model.named_parameters():
            managed = isinstance(parameter, ShardedParameter) or is_ignored(parameter)
            if parameter.requires_grad and not managed:
                raise UsageError(
                    f"{name} was added after thinwire.shard: ranks would not combine its gradients. Add it before, or "
                    "freeze it, or exclude it with thinwire.ignore(parameter)"
                )
        self._checked = count

    # -- gradients ---------------------------------------------------------------------------------------------

    def changed_gradients(self) -> None:
        """Drop the norms, which are stale after a change of gradients."""
        self.norms.forget()
        self.agreements.forget_norm()

    def add_gradient(self, trained: Trained, piece: torch.Tensor) -> None:
        """Take this rank's share, 1-D, of a gradient from an operation on shares; :meth:`merge` adds it."""
        self.agreements.begin_backward()
        self.agreements.used.note(trained.unit, trained.slot)
        self.norms.forget()
        self._added.append((trained, piece))

    def merge(self) -> None:
        """Add the gradients of operations on shares to the combined gradients."""
        added, self._added = self._added, []
        for trained, piece in added:
            self.reducer.join_unit(trained.unit)
            factor = 1 if self.sharded.plan.grad_reduce == "mean" else self.sharded.plan.world
            trained.part.add(trained.owned, piece * factor if factor > 1 else piece)

    def drop_added(self) -> None:
        """Forget the gradients of operations on shares."""
        self._added.clear()
        self.norms.forget()

    def has_added(self) -> bool:
        """Whether there are gradients of operations on shares that are not merged yet."""
        return bool(self._added)

    def after_backward(self) -> None:
        """Call the hooks that wait for combined gradients, after the step's last backward."""
        self.norms.forget()
        for live in self._live:
            if live.hooks and live.share.grad is not None:
                for hook in list(live.hooks.values()):
                    hook(live.share)


class GradientNorms:
    """Caches the norms of all gradients of a model. Each order of norm needs one exchange.

    Args:
        live: Parameters of the model.
    """

    def __init__(self, live: Sequence[ModelParameter]) -> None:
        self._live = live
        self._norms: dict[float, dict[int, torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop all norms, because a gradient has changed."""
        if self._norms:
            self._norms = {}

    def by_parameter(self, order: float) -> dict[int, torch.Tensor]:
        """Norms by ``id`` of the :class:`ModelParameter`; fp32, 0-D. Collective."""
        if order not in self._norms:
            live = [entry for entry in self._live if entry.trained is not None and entry.share.grad is not None]
            partial = torch.stack([power_sum(entry.gradient_piece(), order) for entry in live])
            norms = from_power_sums(live[0].share.spec.holders.combined(partial), order)
            norms = norms.float().to(live[0].share.device)
            self._norms[order] = {id(entry): norm for entry, norm in zip(live, norms, strict=True)}
        return self._norms[order]

    def total(self, order: float) -> torch.Tensor:
        """Norm of the whole gradient, fp32, 0-D. Collective."""
        if not any(entry.share.grad is not None for entry in self._live):
            return torch.tensor(0.0)
        norms = torch.stack(list(self.by_parameter(order).values()))
        total: torch.Tensor = torch.linalg.vector_norm(norms, order)
        return total


class ModelParameter:
    """Connects the share of one parameter to the runtime.

    Args:
        outside: Parameters of the model.
        unit: Unit of the parameter.
        compute: Tensor that the parameter's module computes with.
        trained: Place of the parameter in the runtime; ``None`` if it is frozen.
    """

    share: ShardedParameter

    def __init__(self, outside: Outside, unit: Unit, compute: nn.Parameter, trained: Trained | None) -> None:
        self.outside, self.unit, self.compute_tensor, self.trained = outside, unit, compute, trained
        self.hooks: OrderedDict[int, Callable[[torch.Tensor], None]] = OrderedDict()
        self._gradient: ShareTensor | None = None

    # -- the values --------------------------------------------------------------------------------------------

    def before_write(self) -> None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`."""
        self.outside.before_write()

    def after_write(self) -> None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`."""
        self.outside.dirty.add(self.unit.index)

    def overflowed(self) -> None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`."""

    def norms(self, order: float) -> torch.Tensor | None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`."""
        del order
        return None

    def compute(self, share: ShareTensor, dtypes: set[torch.dtype]) -> torch.Tensor:
        """The whole parameter, for an operation that needs it. Collective.

        This is the module's compute tensor if gradients flow through the operation, or if the operation has plain
        tensors of the same dtype. Otherwise it is the exact values.

        Args:
            share: The parameter, or a detached alias of it.
            dtypes: Dtypes of the operation's plain floating-point tensors.
        """
        follows = torch.is_grad_enabled() and share.requires_grad
        if not follows and (self.compute_tensor.dtype == share.dtype or self.compute_tensor.dtype not in dtypes):
            return share.full_tensor()
        value = self.compute_tensor if follows else self.compute_tensor.detach()
        with self.outside.passes.reading(self.unit.index):
            # Gathered memory is freed even if the caller still has a view of it, so return a copy.
            return value.clone() if self.unit.sharded else value

    # -- the gradient ------------------------------------------------------------------------------------------

    def gradient(self) -> ShareTensor | None:
        """See :class:`~thinwire.sharding.tensors.parameter.LiveParameter`."""
        if self.trained is None:
            return None
        outside, trained = self.outside, self.trained
        if outside.passes.backward.may_be_unreported:
            outside.passes.backward.take_unreported()
        if trained.part.absent and not self.outside.has_added():
            return None
        if not trained.part.unsynced:
            used = outside.agreements.used
            if not used.is_known():
                outside.agree(measure=False)
            if not used.is_used(trained.unit, trained.slot):
                return None
        if self._gradient is None:
            values = trained.part.owned.values[trained.owned]
            self._gradient = ShareTensor(self.gradient_piece, self.share.spec, like=values, live=_LiveGradient(self))
        return self._gradient

    def gradient_piece(self) -> torch.Tensor:
        """Wait for the combined gradient and return this rank's share of it, 1-D.

        Raises:
            UsageError: The backward of the step's last micro-batch has not run.
        """
        assert self.trained is not None
        part = self.trained.part
        if part.unsynced:
            raise UsageError(
                f"the gradient of {self.share.spec.name} is read before the step's last backward: ranks combine "
                "gradients in the last of thinwire.micro_batches(...). Read it after that backward, or call "
                "zero_grad() to drop it"
            )
        self.outside.merge()
        self.outside.reducer.join_unit(self.trained.unit)
        return part.owned.values[self.trained.owned]

    def set_gradient(self, value: torch.Tensor | None) -> None:
        """See :class:`~thinwire.sharding.tensors.parameter.LiveParameter`."""
        trained, agreements = self.trained, self.outside.agreements
        if trained is None:
            if value is not None:
                raise UsageError(
                    f"{self.share.spec.name} was frozen when the model was sharded and takes no gradient: set "
                    "requires_grad before thinwire.shard"
                )
            return
        if value is None:
            if not trained.part.absent or self.outside.has_added():
                self._forget(trained)
            return
        if tuple(value.shape) != tuple(self.share.spec.shape):
            raise UsageError(
                f"{self.share.spec.name}.grad = a tensor of shape {tuple(value.shape)}; the parameter's is "
                f"{tuple(self.share.spec.shape)}"
            )
        if trained.part.unsynced:
            raise UsageError(f"{self.share.spec.name}.grad is set before the step's last backward")
        with torch.no_grad():
            piece = value.piece if isinstance(value, ShareTensor) else self.share.spec.cut(value)
            if self._gradient is None or value is not self._gradient:
                piece = piece.clone()
                self.outside.reducer.join_unit(trained.unit)
                if not trained.part.owned.empty:
                    trained.part.owned.values[trained.owned].zero_()
                trained.part.add(trained.owned, piece)
        agreements.set_used(trained.unit, trained.slot, used=True)
        self.outside.changed_gradients()

    def _forget(self, trained: Trained) -> None:
        outside = self.outside
        outside.merge()
        outside.reducer.join_unit(trained.unit)
        trained.part.forget(trained.index, trained.owned, trained.shard)
        outside.agreements.set_used(trained.unit, trained.slot, used=False)
        outside.changed_gradients()

    def accumulated(self, share: torch.Tensor) -> None:
        """Move the gradient of an operation on shares from torch's own ``.grad`` to the runtime."""
        assert self.trained is not None
        with torch._C.DisableTorchFunctionSubclass():
            grad = _TORCHS_GRAD.__get__(share)
            _TORCHS_GRAD.__set__(share, None)
        spec = self.share.spec
        piece = grad.piece if isinstance(grad, ShareTensor) else spec.cut(spec.holders.mean(grad))
        self.outside.add_gradient(self.trained, piece.detach().clone())

    # -- settings and hooks ------------------------------------------------------------------------------------

    def train(self, *, wanted: bool) -> None:
        """See :class:`~thinwire.sharding.tensors.parameter.LiveParameter`."""
        if wanted and self.trained is None:
            raise UsageError(
                f"{self.share.spec.name} was frozen when the model was sharded, so that it has no master, no "
                "gradient and no optimizer state: set requires_grad = True before thinwire.shard, and freeze it "
                "again afterwards if its training is to begin later"
            )
        self.compute_tensor.requires_grad_(wanted)

    def hook_gradient(self, hook: GradientHook) -> RemovableHandle:
        """See :class:`~thinwire.sharding.tensors.parameter.LiveParameter`."""
        handle: RemovableHandle = self.compute_tensor.register_hook(hook)
        return handle

    def hook_accumulation(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """See :class:`~thinwire.sharding.tensors.parameter.LiveParameter`."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle


class _LiveGradient:
    """Connects the gradient of one parameter to the runtime."""

    def __init__(self, parameter: ModelParameter) -> None:
        self._parameter = parameter

    def before_write(self) -> None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`."""
        self._parameter.gradient_piece()

    def after_write(self) -> None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`."""
        self._parameter.outside.changed_gradients()

    def overflowed(self) -> None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`. The scaler skips the step, and next gradients must not
        contain what codecs have rounded away from these, which is not finite."""
        self._parameter.outside.reducer.forget_lost()

    def norms(self, order: float) -> torch.Tensor | None:
        """See :class:`~thinwire.sharding.tensors.spec.Live`."""
        return self._parameter.outside.norms.by_parameter(order)[id(self._parameter)]


def _accumulation_hook(live: ModelParameter) -> Callable[[torch.Tensor], None]:
    # The garbage collector cannot see this kind of hook, so a strong reference would keep the model alive forever.
    alive = weakref.ref(live)

    def hook(share: torch.Tensor) -> None:
        if (owner := alive()) is not None:
            owner.accumulated(share)

    return hook


def refuse_in_backward(action: str) -> None:
    """Refuse an action inside a backward.

    Raises:
        UsageError: A backward is running; the error names the action.
    """
    if recomputing():
        raise UsageError(
            f"{action} inside a backward, as an optimizer in a hook would: gradients are combined when the backward "
            "has ended. Use thinwire.optimizer(...), which updates each unit as its gradients arrive"
        )

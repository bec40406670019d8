"""What a module's parameters report: that code reads them, and that autograd has their gradients.

*Reads.* A unit's parameters are whole and up to date when its own forward runs. A parent that computes with a child's
weight (a tied head, ``F.linear(x, self.embedding.weight)``, ``self.positions.weight[:T]``) does not call the child's
forward. Every attribute access ends in the module's table of parameters. This file replaces that table, as DeepSpeed's
ZeRO does, to detect reads and to return different tensors inside and outside of passes: compute tensors inside, shares
outside.

*Gradients.* autograd calls a hook for every parameter whose gradient is complete, and each call into Python costs as
much as the copy of a small gradient. A small unit therefore *settles* on one hook. In its first backwards, every
parameter has a hook. If the same parameter comes last in :data:`_STEADY` of them, only that one keeps its hook. From
then on, autograd leaves the gradients of the others in ``.grad``, and the hook takes all of them at once.

If one of them is missing at that moment, the parameters get their hooks back for good. What is still in ``.grad`` at
the end of a backward, because the last parameter had no gradient or another's came again, is taken there. A backward
that reaches only parameters without hooks is found by the next step, or by the next read of a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.utils.hooks import RemovableHandle

from thinwire.errors import UsageError
from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.sharding.lanes.streams import HomeStream
from thinwire.sharding.memory.local import local_gradient
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.modules.quantized import inner_tensors, is_wrapper, rebuilt
from thinwire.sharding.params.param_group import State, Unit
from thinwire.sharding.params.unready import is_plain
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.sharding.step.passes import Delivery, Pass, Passes

IN_PLACE: Final = ("_apply", "_load_from_state_dict")
"""Methods of modules, replaced in those with parameters, that change parameters."""

_stored = dict[str, Any].__getitem__  # every read comes this way, and super() costs a third of it
_read = torch._dynamo.disable(Passes.read)  # re-points storages, which a compiled graph must not trace

_NOT_COMPILED: Final = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)

Hook = TypeVar("Hook", bound=Callable[..., Any])

_STEADY: Final = 2
"""Backwards in a row in which the same parameter must come last before the others lose their hooks."""

_gradient_of: Final = cast(Any, torch._C.TensorBase.grad).__get__
"""``parameter.grad``, without a call into Python for each parameter."""

_DENSE: Final = {torch.Tensor}
"""Types of gradients that are taken at once."""


def outside_compile(hook: Hook) -> Hook:
    """Keep a hook, and everything that it calls, out of compiled graphs, which must not trace the re-pointing of
    storages. The wrapper of ``torch.compiler.disable`` does the same and adds half a microsecond to every call."""
    code = cast(FunctionType, hook)
    set_code_exec_strategy(code.__code__, _NOT_COMPILED)
    code._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


# -- reads -----------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """A parameter of a unit.

    Attributes:
        name: Name of the parameter in the model.
        unit: Unit of the parameter.
        compute: Tensor that modules compute with.
        share: What replaces the tensor outside of passes: its share, or a wrapper around those of inner tensors;
            ``None`` if the tensor is the same everywhere.
    """

    name: str
    unit: Unit
    compute: nn.Parameter
    share: torch.Tensor | None


class _Table(dict[str, Any]):
    """A module's parameters by name. It stores the tensors that modules compute with.

    A table is closed or open, which its class says: a reader of an open one gets what is stored, at the speed of a
    dict. ``entries`` are those of the parameters that belong to units.
    """

    def __init__(self, table: Mapping[str, nn.Parameter | None], entries: Mapping[str, _Entry], passes: Passes) -> None:
        super().__init__(table)
        self._entries, self._passes, self._state = entries, passes, passes.state
        units = list({entry.unit.index: entry.unit for entry in entries.values()}.values())
        self.unit = units[0] if len(units) == 1 else None  # None if they belong to several

    def get(self, name: str, default: Any = None) -> Any:
        """Look up a parameter, like ``dict.get``."""
        return self[name] if dict.__contains__(self, name) else default

    def items(self) -> Any:
        """Pairs of names and parameters. Listing them gathers nothing."""
        if self._passes.is_inside():
            return super().items()
        return [(name, self._outside(name, stored)) for name, stored in super().items()]

    def values(self) -> Any:
        """The parameters of :meth:`items`."""
        return [pair[1] for pair in self.items()]

    def __setitem__(self, name: str, value: Any) -> None:
        entry = self._entries.get(name)
        if entry is None:
            super().__setitem__(name, value)
        elif value is entry.share or value is entry.compute:
            super().__setitem__(name, entry.compute)
        elif isinstance(value, nn.Parameter) or value is None:
            raise UsageError(
                f"{entry.name} = another parameter: the model is sharded, and the new parameter would never "
                "train. Replace it before thinwire.shard, or write to this one with copy_()"
            )
        else:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        entry = self._entries.get(name)
        # peft parametrizes a weight for the length of a forward, which changes nothing of one that stays whole.
        if entry is not None and (entry.unit.sharded or not self._passes.is_inside()):
            raise UsageError(
                f"{entry.name} cannot be taken out of its module, as pruning and parametrizations do: the model is "
                "sharded. Do it before thinwire.shard; for peft's target_parameters, which do it in each forward, "
                "choose a plan with params = 1x1, such as zero2, or target_modules"
            )
        super().__delitem__(name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()

    def stored(self) -> dict[str, Any]:
        """A plain dict of the tensors that modules compute with."""
        return dict(super().items())

    def _outside(self, name: str, stored: Any) -> Any:
        entry = self._entries.get(name)
        return stored if entry is None or entry.share is None or stored is not entry.compute else entry.share


class _Closed(_Table):
    """A table whose readers may need shares, or parameters that are not ready."""

    def __getitem__(self, name: str) -> Any:
        stored = _stored(self, name)
        entry = self._entries.get(name)
        if entry is None:
            return stored
        _, unit, compute, share = entry
        if stored is not compute:
            return stored  # torch.func.functional_call has replaced the parameter
        if share is not None and not self._state.inside and not self._passes.is_inside():
            return share
        if not unit.ready:
            _read(self._passes, unit.index)
        elif unit is self.unit:
            self._state.open(unit)
        return stored


class _Open(_Table):
    """A table whose unit is ready, inside a pass. It has no ``__getitem__`` but that of a dict."""


def _follow(unit: Unit) -> list[_Table]:
    """Open and close tables of parameters with their unit; returns the list that takes them."""
    tables: list[_Table] = []

    def opened(is_open: bool) -> None:
        for table in tables:
            table.__class__ = _Open if is_open else _Closed

    unit.opened = opened
    return tables


def refuse_copy(*_: Any) -> NoReturn:
    """Refuse to pickle the model, or to copy or pickle one of its modules."""
    raise UsageError(
        "a sharded model cannot be pickled, and a module of it cannot be copied alone: copy the model with "
        "copy.deepcopy(model) on every rank; save it with thinwire.save, torch.distributed.checkpoint, or state_dict() "
        "inside thinwire.full_parameters(model)"
    )


def watch_reads(
    model: nn.Module, units: Sequence[Unit], shares: Mapping[str, ShardedParameter], passes: Passes
) -> list[Callable[[], None]]:
    """Replace the table of parameters in every module of a model. A part of a larger model has no ``shares``.

    Returns:
        Functions that put the tables of torch back.
    """
    undo: list[Callable[[], None]] = []
    entries = {
        id(compute): _Entry(slot.name, unit, compute, shares.get(slot.name))
        for unit in units
        for buffer in unit.buffers
        for slot, compute in buffer.named
    }
    for entry in entries.values():
        if is_plain(entry.compute):
            entry.compute.whole = partial(_whole, entry, passes)  # type: ignore[attr-defined]
            undo.append(partial(delattr, entry.compute, "whole"))
    undo += [partial(buffer.mark, ready=True) for unit in units for buffer in unit.buffers]
    entries |= {
        id(wrapper): _of_wrapper(name, wrapper, entries)
        for name, wrapper in model.named_parameters()
        if is_wrapper(wrapper) and not is_ignored(wrapper)
    }
    of_units = {unit: _follow(unit) for unit in units}
    for module in model.modules():
        own = {name: entries[id(p)] for name, p in module._parameters.items() if id(p) in entries}
        if own:
            module._parameters = table = _Closed(module._parameters, own, passes)
            if table.unit is not None:
                of_units[table.unit].append(table)
            undo.append(partial(remove_table, module))
            undo += [_change_in_place(module, name) for name in IN_PLACE]
    return undo


def _change_in_place(module: nn.Module, name: str) -> Callable[[], None]:
    """Let a method change the module's parameters in place, whatever ``set_swap_module_params_on_conversion`` of
    ``torch.__future__`` says: what torch would swap into them has no runtime, and never trains. Returns a function that
    ends it."""
    method, future = getattr(module, name), torch.__future__

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        swaps = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(False)
        try:
            return method(*args, **kwargs)
        finally:
            future.set_swap_module_params_on_conversion(swaps)

    setattr(module, name, called)
    return partial(delattr, module, name)


def _of_wrapper(name: str, wrapper: nn.Parameter, entries: Mapping[int, _Entry]) -> _Entry:
    """The entry of a wrapper, made of those of its inner tensors."""
    inner = [entries[id(each)] for _, each in inner_tensors(name, wrapper)]
    unit = inner[0].unit
    if not unit.sharded or any(each.share is None for each in inner):
        return _Entry(name, unit, wrapper, None)

    def share_of(each: torch.Tensor) -> torch.Tensor:
        share = entries[id(each)].share
        assert share is not None
        return share

    return _Entry(name, unit, wrapper, rebuilt(wrapper, share_of))


def _whole(entry: _Entry, passes: Passes) -> torch.Tensor:
    """What stands for a parameter that is not ready, and was listed or kept, in a computation."""
    if entry.share is not None and not passes.is_inside():
        return entry.share
    passes.read(entry.unit.index)
    return entry.compute


def remove_table(module: nn.Module) -> None:
    """Put torch's table of parameters back into a module, if it has ours."""
    if isinstance(module._parameters, _Table):
        module._parameters = module._parameters.stored()


# -- gradients -------------------------------------------------------------------------------------------------


class Deliveries(Delivery):
    """The hooks on the trained parameters of one unit. Memory of gradients belongs to the stream ``home``."""

    def __init__(self, unit: Unit, gradients: Sequence[UnitGradient], passes: Passes, home: HomeStream) -> None:
        self._unit, self._index, self._passes, self._state, self._home = unit, unit.index, passes, passes.state, home
        self._parameters: list[torch.Tensor] = [*unit.trained]
        # Gradients that wait for the rest of the unit in this backward, by number of the parameter. None stands for one
        # that does not wait, because a gradient of the unit has come twice.
        self._waiting: dict[int, torch.Tensor | None] = {}
        # Whether they may wait for each other without memory that they do not take otherwise.
        self._waits = all(part.waits for part in gradients)
        # On a device with streams, each gradient may belong to another one.
        self._may_settle = self._waits and not self._home.exists and len(self._parameters) > 1
        self._may_settle &= all(map(is_plain, self._parameters))
        self._came_last, self._times = -1, 0  # the parameter that came last, and in how many backwards in a row
        self._only: int | None = None  # the parameter that has the unit's only hook, once it has settled
        with torch._C.DisableTorchFunctionSubclass():  # a hook takes a third of the time
            self._handles = [self._hook(slot) for slot in range(len(self._parameters))]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def has_left(self) -> bool:
        if self._only is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():  # parameters may not be ready
            return list(map(_gradient_of, self._parameters)).count(None) < len(self._parameters)

    def end_backward(self) -> None:
        if self._waiting:
            self._stop_waiting()
            self._waiting.clear()
        if self.has_left():
            self._unsettle()
            for slot, grad in self._take():
                self._passes.collect(self._index, slot, grad)

    def forget(self) -> None:
        self._waiting.clear()
        if self._only is not None:
            with torch._C.DisableTorchFunctionSubclass():
                for parameter in self._parameters:
                    parameter.grad = None

    # -- hooks -------------------------------------------------------------------------------------------------

    def _hook(self, slot: int) -> RemovableHandle:
        # The garbage collector cannot see this kind of hook, so a strong reference would keep the model alive forever.
        alive = weakref.ref(self)

        @outside_compile
        def hook(parameter: torch.Tensor) -> None:
            if (unit := alive()) is None:
                return
            if unit._unit.state is not State.GATHERED and unit._index not in unit._passes.holds.copied:
                unit._refuse(slot)
            if unit._only is not None:
                grads: list[Any] = list(map(_gradient_of, unit._parameters))
                if set(map(type, grads)) != _DENSE or torch.is_grad_enabled():
                    # They came in another way than before: take them one by one, from now on.
                    unit._unsettle()
                    for number, grad in unit._take():
                        unit._deliver(number, grad)
                    return
                for parameter in unit._parameters:
                    parameter.grad = None
                if unit._state.present is not Pass.BACKWARD:
                    unit._passes.begin()
                unit._passes.all_gradients(unit._index, grads)
            elif parameter.grad is not None:
                unit._take_one(slot, parameter)

        parameter = self._parameters[slot]
        is_frozen = not parameter.requires_grad  # by the user, for a while; torch takes no hook then
        if is_frozen:
            parameter.requires_grad_(True)
        handle = cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(hook))
        if is_frozen:
            parameter.requires_grad_(False)
        return handle

    def _refuse(self, slot: int) -> NoReturn:
        """Refuse a backward that has computed with freed parameters, whose values are NaN."""
        slots = [each for buffer in self._unit.buffers if buffer.layout.trainable for each in buffer.layout.slots]
        raise UsageError(
            f"a backward reached {slots[slot].name}, and none of the outputs of its unit {self._unit.name} before, so "
            "the unit's parameters were freed: it begins at a tensor of the unit's forward that no output depends on. "
            "Return that tensor from the forward, or keep it as an attribute of its module"
        )

    def _take_one(self, slot: int, parameter: torch.Tensor) -> None:
        """Take one gradient, and those of the whole unit if it is the last."""
        waiting, grad = self._waiting, cast(torch.Tensor, parameter.grad)
        parameter.grad = None
        if type(grad) is not torch.Tensor or grad.requires_grad or grad.layout is not torch.strided:
            grad = self._plain(parameter, grad)
        if not self._waits or slot in waiting or (self._home.exists and self._home.is_elsewhere()):
            self._deliver(slot, grad)
            return
        if self._state.present is not Pass.BACKWARD:
            self._passes.begin()
        waiting[slot] = grad
        count = len(self._parameters)
        if len(waiting) == count:
            self._note_last(slot)
            self._passes.all_gradients(self._index, [cast(torch.Tensor, waiting[number]) for number in range(count)])
            waiting.clear()

    def _take(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Take the gradients that autograd has left, with the numbers of their parameters."""
        for slot, parameter in enumerate(self._parameters):
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                yield slot, self._plain(parameter, grad)

    def _deliver(self, slot: int, grad: torch.Tensor) -> None:
        """Deliver a gradient by itself."""
        with self._home.visit() as is_away:
            if self._state.present is not Pass.BACKWARD:
                self._passes.begin()
            if self._waiting:
                self._stop_waiting()
            # The runtime drops what it is given when it likes.
            if self._passes.collect(self._index, slot, grad.clone() if is_away else grad):
                self._passes.gradients_ready(self._index)

    def _stop_waiting(self) -> None:
        """Deliver the gradients that wait for the rest of the unit, and let none wait until the backward ends."""
        waiting = self._waiting
        for slot in range(len(self._parameters)):
            grad, waiting[slot] = waiting.get(slot), None
            if grad is not None:
                self._passes.collect(self._index, slot, grad)

    def _plain(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """A gradient as a dense tensor of this rank; a backward with create_graph delivers one that requires a
        gradient."""
        grad = local_gradient(parameter, grad.detach())
        if grad.layout is torch.strided:
            return grad
        self._may_settle = False
        return grad.to_dense()

    # -- how many parameters have hooks ------------------------------------------------------------------------

    def _note_last(self, slot: int) -> None:
        """Note which parameter came last, and settle on it if it always does."""
        self._times = self._times + 1 if slot == self._came_last else 1
        self._came_last = slot
        if self._times < _STEADY or not self._may_settle:
            return
        self._only = slot
        for number, handle in enumerate(self._handles):
            if number != slot:
                handle.remove()
                # torch calls an empty table of hooks as it calls a full one.
                parameter: Any = self._parameters[number]
                if not parameter._post_accumulate_grad_hooks:
                    parameter._post_accumulate_grad_hooks = None

    def _unsettle(self) -> None:
        """Give all parameters their hooks back, for good."""
        only, self._only, self._may_settle = self._only, None, False
        for number in range(len(self._parameters)):
            if number != only:
                self._handles[number] = self._hook(number)

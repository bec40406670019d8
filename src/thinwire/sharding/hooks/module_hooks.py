"""Module and autograd hooks that report PyTorch's actions to the runtime as events. They make no decisions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from thinwire.errors import UsageError
from thinwire.sharding.hooks.parameter_hooks import Deliveries, outside_compile, refuse_copy, watch_reads
from thinwire.sharding.lanes.streams import HomeStream
from thinwire.sharding.modules.graphs import refuse_cuda_graphs
from thinwire.sharding.modules.inputs import cast_inputs, gradient_sources, tensors_in
from thinwire.sharding.modules.linears import InputGradient, compute_weight_gradient_first
from thinwire.sharding.modules.norms import compute_beside_statistics, keeps_statistics
from thinwire.sharding.modules.quantized import is_wrapper, rebuilt
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.sharding.step.passes import Passes
from thinwire.sharding.step.pinned_units import recomputing
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.sharding.tensors.tensor import ShareTensor
from thinwire.sharding.tensors.views import StateEntry


def install(runtime: Runtime) -> list[Callable[[], None]]:
    """Hook every unit of a model, and the root.

    Returns:
        Functions that remove the hooks; call them in reverse order.
    """
    undo: list[Callable[[], None]] = []
    sharded, passes, shares, model = runtime.sharded, runtime.passes, runtime.shares, runtime.model
    dtype: torch.dtype = getattr(torch, sharded.plan.compute_dtype)
    views: list[_View] = []  # outputs of the current forward
    gathered = frozenset(b.full.untyped_storage()._cdata for u in sharded.units if u.sharded for b in u.buffers)
    for unit in sharded.units:
        _hook_unit(unit, sharded, passes, gathered, views, undo)
        if unit.info.trainable:
            undo.append(hook_gradients(unit, sharded, passes))
    undo.append(
        model.register_forward_pre_hook(outside_compile(cast_inputs(dtype)), prepend=True, with_kwargs=True).remove
    )
    _hook_forward(sharded, passes, views, undo)
    undo += watch_reads(model, sharded.units, shares or {}, passes)
    undo += [compute_beside_statistics(module) for module in model.modules() if keeps_statistics(module)]
    if shares is not None:
        model.forward = as_forward(model, model.forward)
        undo.append(functools.partial(delattr, model, "forward"))
        object.__setattr__(model, "__reduce_ex__", refuse_copy)
        undo.append(functools.partial(object.__delattr__, model, "__reduce_ex__"))
    for module in model.modules():
        # Other models may share a module without parameters, as they share activation functions in transformers.
        if shares is None and next(module.parameters(), None) is not None:
            module.register_state_dict_pre_hook(_state_dict_hook(runtime))
            module.register_load_state_dict_pre_hook(_refuse_load)
        if any(parameter is not None for parameter in module._parameters.values()):
            undo.append(module.register_state_dict_post_hook(_copy_parameters).remove)
            if shares is not None:
                undo.append(module.register_load_state_dict_pre_hook(_copy_assigned).remove)
    return undo


def hook_gradients(unit: Unit, sharded: ShardedModel, passes: Passes) -> Callable[[], None]:
    """Take the gradients of a unit's trained parameters from autograd; returns a function that ends it."""
    if isinstance(former := passes.deliveries.get(unit.index), Deliveries):
        former.remove()
    deliveries = Deliveries(unit, sharded.gradients[unit.index], passes, sharded.lanes.home)
    passes.deliver_by(unit.index, deliveries)
    return deliveries.remove


def as_forward(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method of a model to run like its forward, including hooks. Calls inside a pass run unchanged."""
    passes = runtime_of(model).passes

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if passes.is_inside():
            with _explaining():
                return method(*args, **kwargs)
        own_forward = model.__dict__.get("forward")
        model.forward = method
        try:
            return model(*args, **kwargs)
        finally:
            if own_forward is None:
                del model.forward
            else:
                model.forward = own_forward

    return called


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Say in words what torch finds where a view of a parameter is used after the parameter's memory was freed."""
    try:
        yield
    except RuntimeError as error:
        if "data is not allocated yet" not in str(error):
            raise
        raise UsageError(
            "a view of a parameter, such as weight.t(), is used after the forward of its module, which has freed the "
            "memory: keep the parameter itself, module.weight, and take the view where it is used"
        ) from error


def _hook_forward(sharded: ShardedModel, passes: Passes, views: list[_View], undo: list[Callable[[], None]]) -> None:
    from_any_stream = sharded.lanes.home.visited_by
    is_known = False  # whether the model has run, so that what it is compiled with has been seen

    @outside_compile
    @from_any_stream
    def enter(module: nn.Module, _args: Any) -> None:
        nonlocal is_known
        if not is_known:
            refuse_cuda_graphs(module)
            is_known = True
        passes.enter_forward()

    @outside_compile
    @from_any_stream
    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        if passes.holds.reads and torch.is_grad_enabled():
            # A parent that computes with a child's weight is no unit, so no other hook runs before its backward.
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(begin_backward)
        _follow(views)
        passes.leave_forward()

    @from_any_stream
    def begin_backward(_grad: torch.Tensor) -> None:
        passes.begin()

    undo.append(sharded.model.register_forward_pre_hook(enter, prepend=True).remove)
    undo.append(sharded.model.register_forward_hook(leave, always_call=True).remove)


def _hook_unit(
    unit: Unit,
    sharded: ShardedModel,
    passes: Passes,
    gathered: frozenset[int],
    views: list[_View],
    undo: list[Callable[[], None]],
) -> None:
    index, home, audit = unit.index, sharded.lanes.home, passes.audit
    begins_plainly, ends_plainly = passes.note_plain(ends=False), passes.note_plain(ends=True)
    from_any_stream = home.visited_by

    # Nothing waits for the backward of a whole unit, except that its weight's gradient comes first.
    is_sharded, recorder = unit.sharded, sharded.lanes.recorder
    announces = is_sharded or unit.info.weight_first
    cast = _cast_of(sharded, unit)
    leaves = False  # whether ``leave_root_unit`` is registered, which ends a pass that the unit's own forward began

    # Collected before the forward, because the forward may add tensors to its inputs, or change them in place.
    sources: list[_Source] = []
    keepers, began = _keepers(unit, sharded.units) if is_sharded else [], 0

    @outside_compile
    @from_any_stream
    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal leaves, began
        if not is_sharded and begins_plainly(index):
            return None if cast is None else cast(module, args, kwargs)
        passes.pre_forward(index)
        if audit.compares_values:
            audit.before_forward(unit)
        if not leaves and passes.root_unit == index:
            leaves = True
            undo.append(module.register_forward_hook(leave_root_unit, always_call=True).remove)
        # Only a sharded unit is freed after its backward.
        if is_sharded and torch.is_grad_enabled():
            sources[:] = [(tensor, tensor._version) for tensor in gradient_sources(args, kwargs)]
            began = _nodes_so_far()
        return None if cast is None else cast(module, args, kwargs)

    @outside_compile
    @from_any_stream
    def leave_root_unit(_module: nn.Module, _args: Any, _output: Any) -> None:
        _follow(views)
        passes.leave_root_unit(index)

    @outside_compile
    @from_any_stream
    def post_forward(_module: nn.Module, _args: Any, output: Any) -> Any:
        if not announces and ends_plainly(index):
            return None
        if audit.compares_values:
            audit.after_forward(unit)
        # Most modules return a tensor that certainly has memory of its own.
        if is_sharded and (type(output) is not torch.Tensor or output.grad_fn is None or output._is_view()):
            output = _keep(output, gathered)
        hears = (announces or recorder.timeline is not None) and torch.is_grad_enabled()
        if hears:
            kept = _kept(keepers, began) if keepers else ()
            hears = _announce_backward(passes, home, unit, tuple(sources), output, kept, views)
            sources.clear()
        passes.post_forward(index, will_hear=hears)
        return output

    if unit.info.weight_first:
        undo.append(compute_weight_gradient_first(unit.module, _InputGradientOf(passes, home, index)))
    undo.append(unit.module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True).remove)
    undo.append(unit.module.register_forward_hook(post_forward).remove)


def _cast_of(sharded: ShardedModel, unit: Unit) -> Callable[..., Any] | None:
    """What casts the inputs of a unit to its dtype, as in FSDP2: an fp32 buffer promotes activations to fp32, which do
    not match the next unit's parameters."""
    plan = sharded.plan
    if unit.module is sharded.model or (plan.compute_dtype == "float32" and not plan.units):
        return None
    return cast_inputs(getattr(torch, plan.unit_dtype(unit.name)))


class _InputGradientOf(InputGradient):
    """Reports the input gradient of a unit that computes it after the gradients of its parameters."""

    def __init__(self, passes: Passes, home: HomeStream, index: int) -> None:
        self._passes, self._home, self._index = passes, home, index

    def expect(self) -> None:
        self._passes.expect_input_gradient(self._index)

    def begin(self) -> None:
        self._passes.input_gradient(self._index)

    def end(self) -> None:
        with self._home.visit():
            self._passes.post_backward(self._index)


_View = tuple[torch.Tensor, int, Callable[[torch.Tensor], None]]
"""An output that is a view: its base, the version that it had, and what its hook calls."""


def _follow(views: list[_View]) -> None:
    """End a forward, which has changed its views by now. A change in place puts a node into the graph that calls the
    one below by itself, past the hooks of that one: hook it as well."""
    for base, version, enter in views:
        if base._version != version and base.grad_fn is not None:
            base.register_hook(enter)
    views.clear()


_Source = tuple[torch.Tensor, int]
"""An input that requires a gradient, and the version that it had before the unit's forward."""

_nodes_so_far = torch._C._autograd._get_sequence_nr


def _keepers(unit: Unit, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """The attributes of a unit's modules that may keep activations, as losses of routers and features are: those of
    classes that are not torch's, outside of the units inside this one."""
    inner = {other.module for other in units if other is not unit}

    def visit(module: nn.Module) -> Iterator[dict[str, Any]]:
        if not type(module).__module__.startswith("torch.nn."):
            yield vars(module)
        for child in module.children():
            if child not in inner:
                yield from visit(child)

    return list(visit(unit.module))


def _kept(keepers: Iterable[dict[str, Any]], began: int) -> list[torch.Tensor]:
    """The tensors among attributes, or in lists and mappings there, whose graph is newer than the node ``began``. A
    backward may begin at one, or reach it before it reaches any output."""
    found: list[torch.Tensor] = []
    for attributes in keepers:
        for name, value in attributes.items():
            kind = type(value)
            if kind is torch.Tensor:
                found.append(value)
            elif kind in _HOLDING and 0 < len(value) <= _MOST_HELD and name[0] != "_":
                found += tensors_in(value)
    return [tensor for tensor in found if (node := tensor.grad_fn) is not None and node._sequence_nr() >= began]


_HOLDING: Final = {list, tuple, dict}
"""Containers of activations that modules keep."""

_MOST_HELD: Final = 256
"""Longest such container that is searched, as every forward does: a vocabulary is one, too."""

_FOLLOWERS: Final = "_thinwire_followers"
"""Attribute of a unit's output: callbacks of the units that take it, called before backward reaches this unit."""


def _announce_backward(
    passes: Passes,
    home: HomeStream,
    unit: Unit,
    sources: Sequence[_Source],
    output: Any,
    kept: Iterable[torch.Tensor],
    views: list[_View],
) -> bool:
    """Register hooks that report ``pre_backward`` at the first gradient of an output, or of a tensor that the unit's
    modules have ``kept``, and ``post_backward`` at the first of the unit's ``sources`` that backward reaches. Returns
    whether every backward that needs the unit will be reported. Outputs that are views join ``views``."""
    outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    if not outputs:
        return not unit.info.trainable and not sources  # without both there is no backward to report
    outputs += [tensor for tensor in kept if not any(tensor is output for output in outputs)]
    inner = [tensor for tensor, version in sources if tensor.grad_fn is not None and tensor._version == version]
    # A leaf's gradient is complete only at the end of a backward. Without sources, the leaves are parameters: on the
    # way to those of units inside this one, backward may read this one's own after their gradients. An input that was
    # changed in place has the gradient of its new value, from the middle of the unit.
    stays = len(inner) < max(len(sources), 1)
    # Hooks hold no tensors: an input held by an output's hook would live until the next garbage collection.
    announced_in = left_in = -1  # ids of backwards, because a retained graph may run several

    def pre_backward(_grad: torch.Tensor, followers: list[Callable[[Any], None]]) -> None:
        nonlocal announced_in
        for follower in followers:
            follower(None)
        if announced_in != (task := torch._C._current_graph_task_id()):
            announced_in = task
            passes.pre_backward(unit.index)

    def post_backward(_grad: Any) -> None:
        nonlocal left_in
        task = torch._C._current_graph_task_id()
        if announced_in == task and left_in != task:
            left_in = task
            passes.post_backward(unit.index)

    enter, leave = pre_backward, post_backward
    if home.exists:
        enter, leave = home.visited_by(enter), home.visited_by(leave)
    for tensor in outputs:
        followers: list[Callable[[Any], None]] = []
        tensor.register_hook(functools.partial(enter, followers=followers))
        setattr(tensor, _FOLLOWERS, followers)
        if (base := tensor._base) is not None and not recomputing():
            views.append((base, tensor._version, functools.partial(enter, followers=followers)))
    if stays:
        return True
    for tensor in inner:
        # Backward often leaves this unit and reaches the previous unit at the same gradient. A separate hook would run
        # after the hook of the previous unit, which gathers: one unit too many would be in memory.
        before: list[Callable[[Any], None]] | None = getattr(tensor, _FOLLOWERS, None)
        if before is None:
            tensor.register_hook(leave)
        else:
            before.append(leave)
    return True


def _keep(output: Any, gathered: frozenset[int]) -> Any:
    """Copy an output that is a parameter or a view of one, because it outlives the unit's memory; ``gathered`` are
    identities of the gathered storages of all units."""

    def is_gathered(tensor: Any) -> bool:
        return (
            tensor.layout is torch.strided
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            and not is_traceable_wrapper_subclass(tensor)
            and tensor.untyped_storage()._cdata in gathered
        )

    if not any(map(is_gathered, tensors_in(output))):
        return output
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if is_gathered(tensor) else tensor, output)


def _state_dict_hook(runtime: Runtime) -> Callable[..., None]:
    holds = runtime.holds

    def hook(*_: Any) -> None:
        runtime.join_spreads()
        if not holds.depth and any(unit.sharded for unit in runtime.units):
            raise UsageError(
                "state_dict() of a model whose parameters are sharded: use thinwire.save(model, optim, path), or call "
                "it inside `with thinwire.full_parameters(model):`"
            )

    return hook


def _copy_parameters(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Copy the parameters in a state dict, which outlives the gathered memory of ``full_parameters``. Shares that are
    whole on every rank become tensors that any program can save and read, unless ``keep_vars`` asks for the parameters
    themselves."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        kept = value is parameter and (isinstance(value, ShareTensor) or is_wrapper(value))
        if isinstance(value, torch.Tensor) and not kept:
            state_dict[prefix + name] = _copied(value)


def _copied(value: torch.Tensor) -> torch.Tensor:
    if is_wrapper(value):
        return rebuilt(value, _copied)
    if isinstance(value, ShareTensor):
        return StateEntry.of(value, value.full_tensor()) if value.spec.pieces == 1 else value
    return value.detach().clone()


def _copy_assigned(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Copy the values of ``load_state_dict(assign=True)``: another parameter in the place of a sharded one would never
    train. In torch, what is assigned may have another dtype."""
    if not metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is not None and isinstance(value, torch.Tensor) and value.dtype != parameter.dtype:
            raise UsageError(
                f"load_state_dict(assign=True) would make {prefix + name} {value.dtype}, and it is {parameter.dtype} "
                "since the model is sharded: leave out assign, which copies the values"
            )
    metadata["assign_to_params_buffers"] = False


def _refuse_load(*_: Any) -> None:
    raise UsageError(
        "load_state_dict() into a sharded model would leave the optimizer's master copy behind: load before "
        "thinwire.shard(model, plan), or use thinwire.load(model, optim, path)"
    )

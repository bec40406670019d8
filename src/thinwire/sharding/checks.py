"""Checks that the ranks can shard a model as its plan says, and that all of them shard the same."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire.agreement import Typed
from thinwire.codecs.registry import check_backend
from thinwire.collectives.group import Control
from thinwire.errors import MismatchError, SpecError, ThinwireError, UsageError
from thinwire.network.order import WITH_PLAN
from thinwire.program import UnitInfo, host_bytes, node_order
from thinwire.sharding.memory.initial import InitialValues, is_on_meta, place_model
from thinwire.sharding.memory.local import local_tensor
from thinwire.sharding.modules.discover import UnitModules, is_ignored
from thinwire.sharding.modules.graphs import refuse_cuda_graphs
from thinwire.sharding.modules.linears import is_plain_linear
from thinwire.sharding.modules.quantized import is_packed, is_wrapper, keep_layouts, open_wrapper
from thinwire.sharding.params.plan_codecs import codec_problems
from thinwire.sharding.runtime.parameter import ShardedParameter
from thinwire.spec import Plan
from thinwire.spec.cut import stage_problems
from thinwire.units import format_bytes

_CHECKED: Final[Typed[tuple[str, int, str, tuple[str, ...]]]] = Typed(tuple[str, int, str, tuple[str, ...]])


def check_arguments(model: object, plan: object, codec_backend: str | None) -> None:
    """Refuse what is no module or no plan, such as a list of modules or the name of a preset.

    Raises:
        UsageError: An argument is of another kind.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is of type {type(model).__name__}: give one torch.nn.Module")
    if not isinstance(plan, Plan):
        raise UsageError(
            f"plan is of type {type(plan).__name__}: give one of Plan.preset(NAME, nodes=N, local=R), "
            "Plan.load(FILE), or Plan.parse(TABLE)"
        )
    if codec_backend is not None:
        check_backend(codec_backend)


def check_supported(plan: Plan, world: int, *, whole: bool = True, whose: str = "the job") -> None:
    """Check that this runtime supports a plan on so many data-parallel ranks, over all islands, which are those of
    ``whose``, and report all problems at once. A ``whole`` model is trained without tensor and pipeline parallelism.

    Raises:
        SpecError: The plan is not supported; the error names every key, its value and the valid values.
    """
    problems = []
    if plan.job_mesh.ranks != world:
        of_islands = "" if plan.job_islands == 1 else f" on each of islands.count = {plan.num_islands} islands"
        problems.append(
            f"mesh = {plan.mesh} has {plan.world} ranks{of_islands}, {whose} has {world}; start {plan.job_mesh.ranks} "
            "ranks, name as many with mesh= or group=, or make the plan for this mesh: "
            "Plan.preset(name, nodes=..., local=...)"
        )
    problems += codec_problems(plan)
    if whole:
        problems += [
            f"{axis} = {ways}: thinwire.shard(model, plan) knows data-parallel ranks only; use "
            "thinwire.parallelize(model, plan), or set it to 1"
            for axis, ways in (("tp", plan.tp), ("pp", plan.pp), ("ep", plan.ep), ("cp", plan.cp))
            if ways != 1
        ]
    problems += stage_problems(plan)
    if plan.placement is not None:
        if not whole and plan.placement != tuple(range(plan.world)):
            problems.append(
                f"placement = {list(plan.placement)}: with tp or pp the launcher's order of hosts places the ranks; "
                "leave it unset"
            )
        try:
            node_order(plan)
        except SpecError as error:
            problems += [f"placement = {list(plan.placement)}: {problem}" for problem in error.problems]
    if problems:
        raise plan.unsuitable(*problems)


def place_on(device: torch.device | None, model: nn.Module, values: InitialValues) -> str:
    """Check the initial values of a meta-device model and move it, without memory; returns the values' identity."""
    if device is None:
        raise UsageError("values= without device=: give the device for the parameters, for example device='cuda:0'")
    if not is_on_meta(model):
        raise UsageError("values= are for models on the meta device, but this one's parameters have values already")
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter) or is_packed(parameter):
            raise UsageError(
                f"parameter {name} is a {type(parameter).__name__} on the meta device, which values= cannot fill: load "
                "the quantized model on every rank, and leave out values="
            )
    source = values.open()
    place_model(model, device)
    return source


def check_host_memory(plan: Plan, units: Sequence[UnitInfo]) -> None:
    """Refuse a residence on the host that a node has no memory for, before any is taken.

    Raises:
        UsageError: What the node's ranks keep there is larger than its free memory.
    """
    if plan.residence.on_device:
        return
    import psutil  # which nothing else of a shard needs

    needed, free = host_bytes(plan, units) * plan.mesh.local, psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"residence {plan.residence}: what the {plan.mesh.local} ranks of a node keep on the host takes "
            f"{format_bytes(needed)} of its memory, and {format_bytes(free)} are free; shard them over more ranks "
            "(optimizer, params), or free memory"
        )


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse two parameters over the same memory, as ``b.weight = nn.Parameter(a.weight.data)`` makes them: they would
    be trained apart."""
    places = []
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter):
            continue  # frozen
        memory = local_tensor(parameter.detach())
        if memory.numel() and memory.layout is torch.strided:
            begin = memory.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
            places.append((str(memory.device), begin, begin + (last + 1) * memory.element_size(), name))
    places.sort()
    for (device, _, end, name), (other, begin, _, neighbour) in itertools.pairwise(places):
        if device == other and begin < end:
            raise UsageError(
                f"{name} and {neighbour} are two parameters over the same memory, which would be trained apart: tie "
                "them as one parameter, as in b.weight = a.weight, or give each memory of its own with clone()"
            )


def check_parameters(model: nn.Module, *, cut: bool) -> None:
    devices = set()
    for name, parameter in model.named_parameters():
        if is_ignored(parameter):
            continue
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name} is on the meta device and has no values: say where they come from with values= and "
                "device=, or materialise the model before, with model.to_empty(device=...) and its initialiser"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name} of a lazy layer has no shape yet: run a forward before thinwire.shard")
        if parameter.is_complex():
            raise UsageError(
                f"parameter {name} is complex, and floating-point parameters are sharded: keep it as real numbers, "
                "torch.view_as_real(weight).clone(), and take torch.view_as_complex of them in the forward"
            )
        if parameter.dtype == torch.float64:
            raise UsageError(
                f"parameter {name} is float64; masters are float32, which would lose digits: convert the model with "
                "model.float() first"
            )
        if parameter.is_inference():
            raise UsageError(
                f"parameter {name} was made under torch.inference_mode(), and no such tensor can be trained: make the "
                "model outside of it"
            )
        if isinstance(parameter, ShardedParameter):
            raise UsageError(
                f"parameter {name} is sharded already, with another model that holds it too: models with a part in "
                "common are one model to thinwire; shard a module that holds both"
            )
        _check_kind(name, parameter, cut=cut)
        if parameter.grad is not None:
            raise UsageError(f"parameter {name} has a gradient already: call model.zero_grad() before thinwire.shard")
        devices.add(str(parameter.device))
    if len(devices) > 1:
        raise UsageError(f"parameters lie on {', '.join(sorted(devices))}: move the model to one device first")


def _check_kind(name: str, parameter: nn.Parameter, *, cut: bool) -> None:
    """Refuse tensor subclasses that cannot be sharded, and prepare wrappers that can.

    Raises:
        UsageError: The parameter is a subclass that is to be trained, or that keeps its values elsewhere.
    """
    if getattr(parameter, "has_fp16_weights", None) is False:
        raise UsageError(
            f"parameter {name} is an Int8Params of bitsandbytes, whose layer keeps the whole weight beside it: load "
            "the model with load_in_4bit=True, or take torchao's int8 weights"
        )
    if parameter.requires_grad and (is_wrapper(parameter) or is_packed(parameter)):
        raise UsageError(
            f"parameter {name} is a {type(parameter).__name__} that is to be trained, and plain tensors are trained: "
            "freeze it with requires_grad_(False) and train adapters beside it, or dequantize it"
        )
    if is_wrapper(parameter) and not cut:
        open_wrapper(name, parameter)
        return
    kind = type(local_tensor(parameter.data) if cut else parameter.data)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        remedy = "use ep = 1" if is_wrapper(parameter) else "make it plain with as_subclass(torch.Tensor)"
        if issubclass(kind, DTensor):
            remedy = (
                "leave out fully_shard, take thinwire.parallelize in the place of parallelize_module, or make it plain "
                "with full_tensor()"
            )
        raise UsageError(f"parameter {name} is a {kind.__name__}; plain tensors are supported: {remedy}")


def check_modules(model: nn.Module, plan: Plan) -> None:
    """Refuse CUDA graphs, sparse buffers, modules that take no hooks, and modules whose forward writes to gathered
    parameters, because the next gather would undo the write."""
    refuse_cuda_graphs(model)
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise UsageError(
                f"buffer {name} is sparse ({buffer.layout}), and ranks exchange dense ones: keep it as an ordinary "
                "attribute of its module, or its indices and values as two buffers"
            )
    keep_layouts(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise UsageError(
                f"{name or 'the model'} is a torch.jit.ScriptModule, which takes no hooks that gather its parameters: "
                "shard the module that it was made of, and compile that with torch.compile; a frozen one may stay "
                "outside of the model"
            )
        decodes = not plan.frozen.storage.is_none and not any(p.requires_grad for p in module.parameters(recurse=False))
        if (plan.gathers or decodes) and getattr(module, "max_norm", None) is not None:
            raise UsageError(
                f"{name}.max_norm = {module.max_norm}: its forward writes to its weight, which is gathered anew each "
                "time where parameters are sharded, or frozen and kept encoded; use a plan with params = 1x1 and "
                "frozen.storage = 'none', or scale rows in the forward"
            )


def check_agreement(
    plan: Plan,
    model: nn.Module,
    modules: Sequence[UnitModules],
    source: str,
    versions: tuple[str, ...],
    problem: ThinwireError | None,
    control: Control,
) -> None:
    """Raise on every rank if plans or models differ or a rank cannot use its own, before a collective hangs."""
    shapes = [
        (unit.name, name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for unit in modules
        for name, p in unit.parameters
    ]
    buffers = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.named_buffers()]
    digest = hashlib.sha256(repr((shapes, buffers)).encode()).hexdigest()[:12]
    mine = plan.fingerprint(), plan.describe(), _CHECKED.encode((digest, len(shapes), source, versions))

    def checked() -> tuple[str, str, bytes]:
        if problem is not None:
            raise problem
        return mine

    def unusable(problems: Mapping[int, str]) -> MismatchError:
        rank, text = next(iter(problems.items()))
        return MismatchError(f"rank {rank} cannot shard its model, while rank {control.rank} can: {text}")

    everyone = control.agree(checked, unusable, WITH_PLAN, raises_own=True)
    for rank, other in enumerate(everyone):
        if other[0] != everyone[0][0]:
            raise MismatchError(
                f"rank {rank} and rank 0 have different plans: [{other[1]}; {other[0]}] against [{everyone[0][1]}; "
                f"{everyone[0][0]}]. Give every rank the same plan file"
            )
    first, *_ = models = [_CHECKED.decode(other[2]) for other in everyone]
    for rank, model_of in enumerate(models):
        layout, count, start, present = model_of
        if present != first[3]:
            raise MismatchError(
                f"rank {rank} and rank 0 have different codecs: {', '.join(present)} against "
                f"{', '.join(first[3])}. Install the same version of the codec's package on every rank"
            )
        if start != first[2]:
            raise MismatchError(
                f"rank {rank} and rank 0 would start from different values: {start or 'its own'} against "
                f"{first[2] or 'its own'}. Give every rank the same weights"
            )
        if model_of != first:
            raise MismatchError(
                f"rank {rank} and rank 0 have different models: {count} parameters with layout {layout} against "
                f"{first[1]} with {first[0]}. Build the same model on every rank"
            )


def check_patterns(plan: Plan, modules: Sequence[UnitModules]) -> None:
    """Refuse a plan with exceptions that match no unit and no block, or exclusions that match no parameter.

    Raises:
        SpecError: Some patterns match nothing; the error names them.
    """
    names = {name for unit in modules for name in (unit.name, unit.list_element)}
    if idle := [unit.match for unit in plan.units if not fnmatch.filter(names, unit.match)]:
        example = next((name for name in sorted(names) if name), "")
        problem = "units: match = {!r} matches no unit; names look like {!r}"
        raise plan.unsuitable(*(problem.format(match, example) for match in idle))
    parameters = [name for unit in modules for name, _ in unit.parameters]
    if idle := [pattern for pattern in plan.wire.exclude if not fnmatch.filter(parameters, pattern)]:
        problem = "wire.exclude: {!r} matches no parameter; names look like {!r}"
        raise plan.unsuitable(*(problem.format(pattern, parameters[0]) for pattern in idle))


def check_input_gradients(plan: Plan, model: nn.Module, modules: Sequence[UnitModules]) -> None:
    """Refuse input gradients after weight gradients for a model in which no unit's reduction would start earlier."""
    if plan.overlap.input_gradient and not any(is_lone_linear(unit) for unit in modules):
        finer = (
            "" if plan.granularity == "module" else "set granularity = 'module', whose units are single modules, or "
        )
        problem = (
            f"overlap.input_gradient = true, but no unit of {type(model).__name__} is a trained nn.Linear of its "
            f"own, with granularity = {plan.granularity!r}; {finer}set overlap.input_gradient = false"
        )
        raise plan.unsuitable(problem)


def is_lone_linear(unit: UnitModules) -> bool:
    """Whether a unit is a linear layer whose backward can deliver the gradients of all its parameters first."""
    own = {id(p) for p in unit.module._parameters.values() if p is not None}
    return is_plain_linear(unit.module) and own == {id(p) for _, p in unit.parameters}

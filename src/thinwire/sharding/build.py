"""Builds a runtime from a module and a plan: layout, memory, groups, initial values, hooks."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from thinwire.agreement import NOTHING, Typed
from thinwire.collectives import group as groups
from thinwire.collectives.group import Control, Meter
from thinwire.collectives.links.nccl import backend_maker
from thinwire.collectives.topology import AxisGroup, DataRanks
from thinwire.errors import MismatchError, SpecError, ThinwireError, UsageError
from thinwire.network.order import WITH_PLAN
from thinwire.program import Axis, BufferInfo, Lane, UnitInfo, check_live, exchanged_units, node_order
from thinwire.sharding.grads.unit_gradient import Topology, UnitGradient
from thinwire.sharding.hooks import module_hooks as hooks
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.sharding.memory.allocator import give_back_freed_memory, keep_freed_memory
from thinwire.sharding.memory.initial import InitialValues, is_on_meta, place_model, read_shard
from thinwire.sharding.memory.layout import FlatLayout, Run, deal_shares, even_shares, lay_out, shard_index
from thinwire.sharding.memory.local import LocalPart, Slice, local_tensor, slice_of
from thinwire.sharding.modules.discover import Selection, UnitModules, discover, is_ignored
from thinwire.sharding.modules.graphs import refuse_cuda_graphs
from thinwire.sharding.modules.linears import is_plain_linear
from thinwire.sharding.modules.recompute import recompute_activations
from thinwire.sharding.optimizer.stock_optimizers import watch_optimizers
from thinwire.sharding.params.gathers import FlatBuffer, GatherLink
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.params.plan_codecs import (
    PlanCodecs,
    agreed_codecs,
    check_exclusions,
    codec_problems,
    is_excluded,
    rounds_parameters,
)
from thinwire.sharding.params.seeds import Seeds
from thinwire.sharding.runtime.runtime import Runtime, attach
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.spec import Plan
from thinwire.startup import warn_of_late_start

__all__ = ["build", "unit_infos"]

_CHECKED: Final[Typed[tuple[str, int, str, tuple[str, ...]]]] = Typed(tuple[str, int, str, tuple[str, ...]])

_GROUPS = (
    (Axis.PARAMS, Lane.GATHER),
    (Axis.SECONDARY, Lane.GATHER),
    (Axis.PARAMS, Lane.REDUCE),
    (Axis.SHARD, Lane.REDUCE),
    (Axis.REPLICA, Lane.SYNC),
    (Axis.SHARD, Lane.SPREAD),
    (Axis.WORLD, Lane.CONTROL),
)


def _outer_groups(plan: Plan) -> list[tuple[Axis, Lane]]:
    """Groups for exchanges with other islands, of which ranks that own the same shares each make a part."""
    if plan.num_islands == 1 and not plan.is_elastic:
        return []
    replicas = [] if plan.optimizer == plan.mesh else [(Axis.REPLICA, Lane.OUTER)]
    return [*([] if plan.is_elastic else [(Axis.ISLANDS, Lane.OUTER)]), *replicas]


@dataclass
class _Flat:
    """A flat buffer that has a layout but no memory yet; ``shares`` is empty for frozen parameters."""

    unit: int
    layout: FlatLayout
    parameters: list[nn.Parameter]
    shares: tuple[tuple[Run, ...], ...] = ()


def build(
    model: nn.Module,
    plan: Plan,
    selection: Selection,
    *,
    sync_initial: bool,
    codec_backend: str | None = None,
    part: LocalPart | None = None,
    values: InitialValues | None = None,
    device: torch.device | None = None,
) -> Runtime:
    """Shard a model in place; see :func:`thinwire.sharding.api.shard`.

    Args:
        model: The model.
        plan: The plan.
        selection: Selection of the units.
        sync_initial: Whether to start from the first rank's values.
        codec_backend: Backend of all codecs; default: the device's own.
        part: Part of a larger model; by default, all ranks of the job train the whole model.
        values: Initial values of a model on the meta device.
        device: Target device of a model on the meta device.
    """
    alone = part is None
    part = part or LocalPart(DataRanks.of(plan, groups.control().ranks, groups.control().rank))
    control, everyone = groups.control(part.data.ranks), groups.control(part.data.everyone)
    modules = _agreed_modules(model, plan, selection, everyone, whole=alone, values=values, device=device)
    device = next(p.device for unit in modules for _, p in unit.parameters)
    if device.type == "cpu":
        give_back_freed_memory()
    codecs = PlanCodecs.of(plan, device, codec_backend)  # may raise, so it comes before memory is allocated
    if plan.placement is not None:
        part = replace(part, data=part.data.placed(plan.placement))
    position = part.data.ranks.index(control.ranks[control.rank])
    meter, lanes = Meter(), Lanes(device, stages=plan.overlap.stages)
    groups.before_shutdown(lanes.close)
    if lanes.home.exists and groups.control().rank == 0:
        warn_of_late_start()
    codecs.warm_up(plan, device)
    axes = {
        (axis, lane): AxisGroup(
            plan,
            axis,
            lane,
            position + part.data.island * plan.world if axis is Axis.ISLANDS else position,
            None if lane is Lane.CONTROL else device,
            meter,
            data=part.data,
        )
        for axis, lane in (*_GROUPS, *_outer_groups(plan))
        if axis is not Axis.SECONDARY or plan.secondary is not None
    }
    decides = alone and lanes.home.exists and backend_maker(device) is not None
    slices = {name: slice_of(name, p) for unit in modules for name, p in unit.parameters}
    initial_of = _Initial(part, everyone if sync_initial else None, values, slices, shard_index(plan, position))
    flats = _draw(modules, plan, position)
    arenas = _Arenas(flats, plan, axes, device)
    buffers, gradients = _place(flats, [unit.name for unit in modules], plan, arenas, initial_of)
    initial_of.agree(everyone)
    if device.type == "cpu":
        keep_freed_memory()
    if sync_initial:
        for value in model.buffers():
            everyone.broadcast(value)
    sharded = ShardedModel(
        model=model,
        plan=plan,
        part=part,
        alone=alone,
        rank=control.rank,
        position=position,
        units=(),
        gradients=gradients,
        arena=arenas.gradients,
        slices=slices,
        lanes=lanes,
        axes=axes,
        world=AxisGroup(plan, Axis.WORLD, Lane.CONTROL, position, device, meter, data=part.data) if decides else None,
        meter=meter,
        codecs=codecs,
        seeds=Seeds(plan, position, part.data.island),
    )
    return _install(replace(sharded, units=_units(sharded, modules, flats, buffers)), modules)


def _agreed_modules(
    model: nn.Module,
    plan: Plan,
    selection: Selection,
    control: Control,
    *,
    whole: bool,
    values: InitialValues | None,
    device: torch.device | None,
) -> list[UnitModules]:
    """Check the plan and the model, find the units, and compare them with the other ranks'. Collective."""
    problem: ThinwireError | None = None
    modules: list[UnitModules] = []
    source = ""
    versions: tuple[str, ...] = ()
    try:
        check_supported(plan, control.size, whole=whole)
        versions = agreed_codecs(plan)
        if values is not None:
            source = _place_on(device, model, values)
        _check_parameters(model, whole=whole)
        _check_modules(model, plan)
        modules = discover(model, selection, plan.granularity, lambda name: plan.override(name).granularity)
        _check_overrides(plan, modules)
        _check_input_gradients(plan, model, modules)
        check_exclusions(plan, [name for unit in modules for name, _ in unit.parameters])
        if plan.live_bytes is not None:
            check_live(plan, unit_infos(modules, plan, 0))
        exchanged_units(plan, unit_infos(modules, plan, 0), 0)
    except ThinwireError as error:
        problem = error  # raised after the exchange, which the other ranks are waiting for
    _check_agreement(plan, model, modules, source, versions, problem, control)
    return modules


def _place(
    flats: Sequence[_Flat], names: Sequence[str], plan: Plan, arenas: _Arenas, initial_of: _Initial
) -> tuple[dict[int, list[FlatBuffer]], dict[int, list[UnitGradient]]]:
    """Carve flat buffers and gradients from the arenas and fill the buffers with initial values.

    Returns:
        Flat buffers and gradients of trainable buffers, by unit.
    """
    buffers: dict[int, list[FlatBuffer]] = {number: [] for number in range(len(names))}
    gradients: dict[int, list[UnitGradient]] = {}
    topology = Topology(plan)
    for flat in flats:
        buffer = arenas.carve(flat, initial_of(flat))
        # Re-point parameters buffer by buffer, so that their old memory is freed while the arenas fill.
        buffer.show(whole=plan.params.ranks == 1)
        if plan.params.ranks > 1:
            buffer.release()
        buffers[flat.unit].append(buffer)
        if flat.layout.trainable:
            of_unit = gradients.setdefault(flat.unit, [])
            first_slot = sum(len(part.layout.slots) for part in of_unit)
            name, memory = names[flat.unit] or "(root)", arenas.carve_gradient(flat)
            of_unit.append(UnitGradient(flat.unit, name, first_slot, flat.layout, flat.shares, memory, topology))
    return buffers, gradients


def _units(
    sharded: ShardedModel,
    modules: Sequence[UnitModules],
    flats: Sequence[_Flat],
    buffers: Mapping[int, Sequence[FlatBuffer]],
) -> tuple[Unit, ...]:
    link = GatherLink(
        sharded.lanes,
        sharded.axes[Axis.PARAMS, Lane.GATHER],
        sharded.axes.get((Axis.SECONDARY, Lane.GATHER)),
        sharded.codecs.gather,
        sharded.seeds,
        sharded.plan.gather_bytes,
    )
    return tuple(
        Unit(
            number,
            unit.module,
            _info(unit, sharded.plan, [flat for flat in flats if flat.unit == number]),
            buffers[number],
            link,
        )
        for number, unit in enumerate(modules)
    )


def _install(sharded: ShardedModel, modules: Sequence[UnitModules]) -> Runtime:
    """Attach a runtime to the model and hook its modules."""
    runtime = Runtime(sharded)
    attach(sharded.model, runtime)
    hooks.install(runtime)
    watch_optimizers()
    if sharded.plan.recompute and not sharded.part.is_inner:
        runtime.undo.append(recompute_activations(sharded.model, _recomputed(sharded.model, modules)))
    return runtime


# -- checks ----------------------------------------------------------------------------------------------------


def check_supported(plan: Plan, world: int, *, whole: bool = True) -> None:
    """Check that this runtime supports a plan, and report all problems at once.

    Args:
        plan: The plan.
        world: Number of data-parallel ranks in the job, over all islands.
        whole: Whether the model is trained without tensor and pipeline parallelism.

    Raises:
        SpecError: The plan is not supported; the error names every key, its value and the valid values.
    """
    problems = []
    if plan.job_mesh.ranks != world:
        of_islands = "" if plan.job_islands == 1 else f" on each of islands.count = {plan.num_islands} islands"
        problems.append(
            f"mesh = {plan.mesh} has {plan.world} ranks{of_islands}, the job has {world}; start {plan.job_mesh.ranks} "
            "ranks, or make the plan for this mesh: Plan.preset(name, nodes=..., local=...)"
        )
    problems += codec_problems(plan)
    if whole:
        problems += [
            f"{axis} = {ways}: thinwire.shard(model, plan) knows data-parallel ranks only; use "
            "thinwire.parallelize(model, plan), or set it to 1"
            for axis, ways in (("tp", plan.tp), ("pp", plan.pp), ("ep", plan.ep), ("cp", plan.cp))
            if ways != 1
        ]
    if plan.pp > 1 and plan.params.ranks > 1:
        problems.append(
            f"params = {plan.params}: parameters of a pipeline stage stay whole, or every micro-batch would gather "
            f"them anew; with pp = {plan.pp} use params = 1x1 and shard grads or optimizer"
        )
    if plan.placement is not None:
        if not whole and plan.placement != tuple(range(plan.world)):
            problems.append(
                f"placement = {list(plan.placement)}: with tp or pp the launcher's order of hosts places the ranks; "
                "leave it unset"
            )
        problems += _placement_problems(plan)
    if problems:
        raise SpecError(f"plan {plan.name or plan.fingerprint()}", problems)


def _place_on(device: torch.device | None, model: nn.Module, values: InitialValues) -> str:
    """Check the initial values of a meta-device model and move it, without memory; returns the values' identity."""
    if device is None:
        raise UsageError("values= without device=: give the device for the parameters, for example device='cuda:0'")
    if not is_on_meta(model):
        raise UsageError("values= are for models on the meta device, but this one's parameters have values already")
    source = values.open()
    place_model(model, device)
    return source


def _check_parameters(model: nn.Module, *, whole: bool) -> None:
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
            raise UsageError(f"parameter {name} is complex; floating-point parameters are supported")
        if parameter.dtype == torch.float64:
            raise UsageError(
                f"parameter {name} is float64; masters are float32, which would lose digits: convert the model with "
                "model.float() first"
            )
        if type(local_tensor(parameter.data) if not whole else parameter.data) is not torch.Tensor:
            raise UsageError(f"parameter {name} is a {type(parameter.data).__name__}; plain tensors are supported")
        if parameter.grad is not None:
            raise UsageError(f"parameter {name} has a gradient already: call model.zero_grad() before thinwire.shard")
        devices.add(str(parameter.device))
    if not devices:
        raise UsageError(f"{type(model).__name__} has no parameters to shard")
    if len(devices) > 1:
        raise UsageError(f"parameters lie on {', '.join(sorted(devices))}: move the model to one device first")


def _check_modules(model: nn.Module, plan: Plan) -> None:
    """Refuse CUDA graphs, and modules whose forward writes to gathered parameters, because the next gather would undo
    the write."""
    refuse_cuda_graphs(model)
    for name, module in model.named_modules():
        if plan.params.ranks > 1 and getattr(module, "max_norm", None) is not None:
            raise UsageError(
                f"{name}.max_norm = {module.max_norm}: its forward writes to its weight, which is gathered anew each "
                "time where parameters are sharded; use a plan with params = 1x1, or scale rows in the forward"
            )


def _check_agreement(
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


def _check_overrides(plan: Plan, modules: Sequence[UnitModules]) -> None:
    """Refuse a plan with exceptions that match no unit and no block; the error names their patterns."""
    names = {name for unit in modules for name in (unit.name, unit.list_element)}
    idle = [unit.match for unit in plan.units if not fnmatch.filter(names, unit.match)]
    if idle:
        example = next((name for name in sorted(names) if name), "")
        raise SpecError(
            f"plan {plan.name or plan.fingerprint()}",
            [f"units: match = {match!r} matches no unit; names look like {example!r}" for match in idle],
        )


def _check_input_gradients(plan: Plan, model: nn.Module, modules: Sequence[UnitModules]) -> None:
    """Refuse input gradients after weight gradients for a model in which no unit's reduction would start earlier."""
    if plan.overlap.input_gradient and not any(is_lone_linear(unit) for unit in modules):
        raise SpecError(
            f"plan {plan.name or plan.fingerprint()}",
            [
                f"overlap.input_gradient = true, but no unit of {type(model).__name__} is a trained nn.Linear of its "
                f"own, with granularity = {plan.granularity!r}; set granularity = 'module', whose units are single "
                "modules, or set overlap.input_gradient = false"
            ],
        )


def _placement_problems(plan: Plan) -> Sequence[str]:
    try:
        node_order(plan)
    except SpecError as error:
        return [f"placement = {list(plan.placement or ())}: {problem}" for problem in error.problems]
    return ()


# -- drawing ---------------------------------------------------------------------------------------------------


def _draw(modules: Sequence[UnitModules], plan: Plan, rank: int) -> list[_Flat]:
    """Lay out the flat buffers of all units, with the shares of a rank's P shard."""
    flats = []
    for number, unit in enumerate(modules):
        compute: torch.dtype = getattr(torch, plan.unit_dtype(unit.name))
        exact = plan.override(unit.name).codec is not None
        kinds: dict[tuple[bool, torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            dtype = compute if parameter.is_floating_point() else parameter.dtype
            encoded = dtype.is_floating_point and not exact and not is_excluded(plan, name)
            kinds.setdefault((parameter.requires_grad, dtype, encoded), []).append((name, parameter))
        # Encoded buffers come first, in the order of reductions.
        for (trainable, dtype, encoded), named in sorted(kinds.items(), key=lambda kind: not kind[0][2]):
            shapes = [(name, local_tensor(p).shape) for name, p in named]
            layout = lay_out(shapes, plan, dtype, trainable=trainable, encoded=encoded)
            flats.append(_Flat(number, layout, [p for _, p in named]))
    trained = [flat for flat in flats if flat.layout.trainable]
    if plan.partition == "inter" and plan.optimizer != plan.params:
        dealt = deal_shares([flat.layout for flat in trained], plan, shard_index(plan, rank))
        for flat, shares in zip(trained, dealt, strict=True):
            flat.shares = shares
    else:
        for flat in trained:
            flat.shares = even_shares(flat.layout, plan)
    return flats


def unit_infos(modules: Sequence[UnitModules], plan: Plan, rank: int) -> tuple[UnitInfo, ...]:
    """Describe a model's units under a plan for the program, without allocating memory.

    Args:
        modules: Units from :func:`~thinwire.sharding.modules.discover.discover`.
        plan: The plan.
        rank: Position in the mesh of the rank with the shares to count.
    """
    flats = _draw(modules, plan, rank)
    return tuple(
        _info(unit, plan, [flat for flat in flats if flat.unit == number]) for number, unit in enumerate(modules)
    )


def _info(unit: UnitModules, plan: Plan, flats: Iterable[_Flat]) -> UnitInfo:
    flats = list(flats)
    return UnitInfo(
        name=unit.name,
        buffers=tuple(
            BufferInfo(
                numel=flat.layout.numel,
                itemsize=flat.layout.dtype.itemsize,
                trainable=flat.layout.trainable,
                shares=tuple(sum(run.length for run in share) for share in flat.shares),
                encoded=flat.layout.encoded,
            )
            for flat in flats
        ),
        parameters=sum(len(flat.layout.slots) for flat in flats if flat.layout.trainable),
        block=unit.block,
        keeps_gathered=plan.override(unit.name).keep_gathered,
        weight_first=plan.overlap.input_gradient and is_lone_linear(unit),
    )


def is_lone_linear(unit: UnitModules) -> bool:
    """Whether a unit is a linear layer whose backward can deliver the gradients of all its parameters first."""
    own = {id(p) for p in unit.module._parameters.values() if p is not None}
    return is_plain_linear(unit.module) and own == {id(p) for _, p in unit.parameters}


def _recomputed(model: nn.Module, modules: Sequence[UnitModules]) -> list[nn.Module]:
    """The blocks whose activations are recomputed: whole elements of module lists, even if units are smaller."""
    named = dict(model.named_modules())
    blocks = {unit.list_element: named[unit.list_element] for unit in modules if unit.list_element}
    if not blocks:
        raise UsageError(
            "recompute = true, but the model has no block (an element of a ModuleList or Sequential, or a module given "
            "in units=) to recompute; set recompute = false"
        )
    return list(blocks.values())


# -- memory ----------------------------------------------------------------------------------------------------


class _Arenas:
    """One contiguous allocation for each kind of shard. Buffers are carved from it in order, without fragmentation."""

    def __init__(
        self,
        flats: Sequence[_Flat],
        plan: Plan,
        axes: dict[tuple[Axis, Lane], AxisGroup],
        device: torch.device,
    ) -> None:
        self._device, self._rounds = device, rounds_parameters(plan)
        self._params = axes[Axis.PARAMS, Lane.GATHER]
        self._secondary = axes.get((Axis.SECONDARY, Lane.GATHER))
        self._share = axes[Axis.SHARD, Lane.REDUCE].index
        by_dtype: dict[torch.dtype, int] = {}
        for flat in flats:
            by_dtype[flat.layout.dtype] = by_dtype.get(flat.layout.dtype, 0) + flat.layout.shard_numel
        self._shards = {dtype: _Arena(numel, dtype, device) for dtype, numel in by_dtype.items()}
        self._seconds = (
            {
                dtype: _Arena(numel * self._params.size // self._secondary.size, dtype, device)
                for dtype, numel in by_dtype.items()
            }
            if self._secondary is not None
            else {}
        )
        owned = sum(self._owned(flat) for flat in flats if flat.layout.trainable)
        separate = sum(self._owned(flat) for flat in flats if self._has_master(flat.layout))
        self._masters = _Arena(separate, torch.float32, device)
        self.gradients = torch.zeros(owned, dtype=getattr(torch, plan.accumulate_dtype), device=device)
        self._gradient_at = 0

    def carve(self, flat: _Flat, initial: torch.Tensor) -> FlatBuffer:
        """Place a flat buffer and fill this rank's part of it.

        Args:
            flat: The buffer.
            initial: Initial values of this rank's P shard, ``[layout.shard_numel]``, in the parameters' dtype or wider.
        """
        layout = flat.layout
        shard = self._shards[layout.dtype].carve(layout.shard_numel)
        shard.copy_(initial)
        whole = self._params.size == 1
        full = shard if whole else torch.empty(layout.numel, dtype=layout.dtype, device=self._device)
        secondary = None
        if self._secondary is not None:
            secondary = self._seconds[layout.dtype].carve(layout.numel // self._secondary.size)
        master = None
        if self._has_master(layout):
            master = self._masters.carve(self._owned(flat))
            position = 0
            for run in flat.shares[self._share]:
                source = initial[run.start : run.start + run.length]
                master[position : position + run.length].copy_(source)
                position += run.length
        return FlatBuffer(layout, flat.parameters, full, shard, flat.shares, secondary, master)

    def carve_gradient(self, flat: _Flat) -> torch.Tensor:
        """Memory for the gradient of this rank's share, in the plan's ``accumulate_dtype``."""
        size = self._owned(flat)
        self._gradient_at += size
        return self.gradients[self._gradient_at - size : self._gradient_at]

    def _has_master(self, layout: FlatLayout) -> bool:
        """Whether the masters have memory of their own, apart from the P shard."""
        return layout.trainable and (layout.dtype != torch.float32 or (self._rounds and layout.encoded))

    def _owned(self, flat: _Flat) -> int:
        return sum(run.length for run in flat.shares[self._share])


class _Arena:
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.zeros(numel, dtype=dtype, device=device)
        self._at = 0

    def carve(self, numel: int) -> torch.Tensor:
        self._at += numel
        return self._memory[self._at - numel : self._at]


class _Initial:
    """Provides the initial values of this rank's P shards, one flat buffer at a time.

    Args:
        part: Part of a larger model that this rank trains.
        control: Control of the ranks that start from the first rank's values; ``None`` if each rank uses its own.
        values: Initial values; ``None`` if the parameters hold them.
        slices: Slices of the parameters that tensor parallelism cuts, by name.
        shard: Index of this rank's P shard.
    """

    def __init__(
        self,
        part: LocalPart,
        control: Control | None,
        values: InitialValues | None,
        slices: Mapping[str, Slice | None],
        shard: int,
    ) -> None:
        self._part, self._control, self._values, self._slices, self._shard = part, control, values, slices, shard
        self._problem: ThinwireError | None = None

    def __call__(self, flat: _Flat) -> torch.Tensor:
        """Initial values, ``[flat.layout.shard_numel]``: fp32, or the buffer's dtype if it is not floating-point."""
        layout = flat.layout
        if self._values is None:
            begin = self._shard * layout.shard_numel
            return self._whole(flat)[begin : begin + layout.shard_numel]
        if self._problem is None:
            try:
                return read_shard(layout, self._shard, self._values, self._slices)
            except ThinwireError as error:
                self._problem = error  # agree() raises it, because the other ranks continue until then
        return torch.zeros(layout.shard_numel, dtype=layout.dtype)

    def agree(self, control: Control) -> None:
        """Raise on every rank if any rank could not read its values.

        Raises:
            ThinwireError: The error of this rank, or a :class:`MismatchError` that quotes the error of another rank.
        """
        if self._values is None:
            return

        def raise_own() -> None:
            if self._problem is not None:
                raise self._problem

        def unread(problems: Mapping[int, str]) -> MismatchError:
            rank, text = next(iter(problems.items()))
            return MismatchError(f"rank {rank} cannot read its initial values: {text}")

        control.agree(raise_own, unread, NOTHING, raises_own=True)

    def _whole(self, flat: _Flat) -> torch.Tensor:
        """Initial values of a whole buffer, taken from the first rank if ranks are synchronised."""
        first = flat.parameters[0]
        dtype = torch.float32 if first.is_floating_point() else first.dtype
        values = torch.zeros(flat.layout.numel, dtype=dtype, device=first.device)
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
            value = self._part.masters.get(slot.name, parameter.detach())
            values[slot.offset : slot.offset + slot.numel].copy_(local_tensor(value).reshape(-1))
        if self._control is not None:
            self._control.broadcast(values)
        return values

"""The public interface: shard a model, train it like any PyTorch model, save it, and load it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.checkpoint.background import PendingSave
from thinwire.collectives import group as groups
from thinwire.errors import UsageError
from thinwire.network.order import order_ranks
from thinwire.program import Scope
from thinwire.program.timeline import Timeline
from thinwire.sharding.build import build
from thinwire.sharding.checkpointing import loading, saving
from thinwire.sharding.checkpointing.full_state import whole_value
from thinwire.sharding.checkpointing.share_states import Optimizers, states_of
from thinwire.sharding.checks import check_arguments
from thinwire.sharding.copying import Additions, allow_copies
from thinwire.sharding.hooks.module_hooks import as_forward
from thinwire.sharding.incremental import join_parts
from thinwire.sharding.islands.elastic import ElasticExchanges, Exchanged
from thinwire.sharding.memory.initial import InitialValues
from thinwire.sharding.modules.discover import Selection, ignore
from thinwire.sharding.optimizer.making import build_optimizer
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer, clip_grad_norm_
from thinwire.sharding.runtime.joining import joined
from thinwire.sharding.runtime.runtime import Runtime, runtime_of, sharded_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.spec import Plan

__all__ = [
    "async_save",
    "clip_grad_norm_",
    "enter_islands",
    "exposed",
    "full_parameters",
    "full_state_dict",
    "ignore",
    "join",
    "join_islands",
    "load",
    "micro_batches",
    "num_steps",
    "optimizer",
    "progress",
    "register_forward_method",
    "save",
    "shard",
    "timeline",
    "traffic",
    "worked",
]

Module = TypeVar("Module", bound=nn.Module)
Item = TypeVar("Item")


def shard(
    model: Module,
    plan: Plan,
    *,
    units: Selection = None,
    sync_initial: bool = True,
    codec_backend: str | None = None,
    values: InitialValues | None = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
) -> Module:
    """Shard a model's parameters, gradients and optimizer states by a plan, in place.

    Call this on every rank that trains the model, before you make the optimizer. From then on, ``model.parameters()``
    returns this rank's shares of the fp32 masters (:class:`~thinwire.sharding.runtime.parameter.ShardedParameter`): you
    can read them, write to them, take their ``.grad``, and pass them to any optimizer. Inside forward and backward,
    modules see whole tensors in the plan's compute dtype. Updated parameters travel while the next forward runs. If
    ``torch.distributed`` is not initialised yet, this joins the job described by torchrun's environment.

    You can also shard parts first, and then the model (``for block in model.layers: tw.shard(block, plan)``,
    ``tw.shard(model, plan)``). The parts become the model's units. A part's plan may have another ``compute_dtype``,
    whole parameters, which then stay gathered from forward to backward, or no codecs. What travels when is up to the
    model's plan.

    Args:
        model: Any module with materialised parameters on one device, or with all parameters on the meta device. The
            latter are replaced by new parameters.
        plan: The plan; its mesh has as many ranks as the job, or as ``mesh`` or ``group``.
        units: Modules that are each gathered, freed and reduced as a whole: modules or their names, or a predicate on
            ``(name, module)``. Default: elements of the model's module lists, large leaves outside them, and the rest.
        sync_initial: Whether to start from rank 0's parameters and buffers; otherwise all ranks must have equal ones.
        codec_backend: One of :data:`thinwire.codecs.BACKENDS`; default: the device's own.
        values: Initial values of a model on the meta device. Each rank reads only the values that it keeps, one flat
            buffer at a time. No rank holds the whole model, unless the plan says so.
        device: Target device of a model on the meta device.
        mesh: The ranks that train the model, row by row in the order of the plan's nodes; default: all ranks of the
            job. How the model is sharded over them is up to the plan. Only these ranks call this, and whatever else
            every rank calls.
        group: The same ranks as a process group.

    Returns:
        The same object.

    Raises:
        SpecError: This runtime or this job does not support the plan, or its topology cannot be read.
        MismatchError: Ranks have different plans or models.
        UsageError: The model cannot be sharded.
    """
    check_arguments(model, plan, codec_backend)
    groups.enter()
    target = None if device is None else torch.device(device)
    members = groups.ranks_of(mesh, group)
    present = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    plan = order_ranks(plan, groups.control(members), target or present, members).plan
    units, plan = join_parts(model, plan, units, members)
    added = Additions(model)
    build(
        model,
        plan,
        units,
        sync_initial=sync_initial,
        codec_backend=codec_backend,
        values=values,
        device=target,
        members=members,
    )
    allow_copies(model, added, units, codec_backend, members)
    return model


def optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    param_groups: Iterable[Mapping[str, Any]] | None = None,
    skip_nonfinite: bool = False,
    loss_scale: LossScale | None = None,
    **options: Any,
) -> ShardedOptimizer:
    """Make any torch optimizer over this rank's share of the fp32 masters.

    Args:
        model: A sharded model.
        optimizer_class: Class of the optimizer, for example ``torch.optim.AdamW``. A class that updates whole tensors
            (Muon, Adafactor) needs ``partition = "inter"`` and unsharded parameters. A trial on small tensors detects
            such classes; their names do not matter.
        param_groups: Parameter groups, as in torch; ``params`` may also be name patterns such as ``"*norm*"``.
            Parameters in no group get the defaults.
        skip_nonfinite: Whether to leave the parameters unchanged if the gradient norm is NaN or infinite.
        loss_scale: Scale of the losses, which plans with float16 need. The step divides the gradients by it, unless
            :func:`thinwire.clip_grad_norm_` has done so, skips a gradient that is not finite, and adjusts the scale.
        **options: Options of the class, for example ``lr=3e-4, fused=True``.

    Returns:
        An optimizer; its ``step`` updates the share and starts spreading it.

    Raises:
        UsageError: The class or an option does not suit shares, or a plan with float16 has no loss scale.
    """
    if loss_scale is not None:
        if not isinstance(loss_scale, LossScale):
            raise UsageError(f"loss_scale = {loss_scale!r}: give a thinwire.LossScale, as LossScale(65536.0)")
        loss_scale.belong_to(model)
    return build_optimizer(
        model,
        optimizer_class,
        param_groups=param_groups,
        skip_nonfinite=skip_nonfinite,
        loss_scale=loss_scale,
        options=options,
    )


def micro_batches(model: nn.Module | Sequence[nn.Module], batches: Iterable[Item]) -> Iterator[Item]:
    """Iterate over the micro-batches of one step, so that the runtime knows the last one.

    Gradients add up over micro-batches, as in PyTorch. For a mean, divide each loss by the number of micro-batches.

    Args:
        model: A sharded model, or several that are trained on the same micro-batches.
        batches: Micro-batches of the step.
    """
    return micro_batches_of(_runtimes_of(model), batches)


def _runtimes_of(model: nn.Module | Sequence[nn.Module]) -> list[Runtime]:
    models = [model] if isinstance(model, nn.Module) else model
    if not models:
        raise UsageError(f"model = {model!r}: give a sharded model, or several")
    return [runtime_of(one) for one in models]


def micro_batches_of(runtimes: Sequence[Runtime], batches: Iterable[Item]) -> Iterator[Item]:
    """The same for the runtimes of a model's parts, which run together."""
    iterator, missing, number = iter(batches), object(), 0
    current: Any = next(iterator, missing)
    if current is missing:
        return
    try:
        while current is not missing:
            upcoming = next(iterator, missing)
            for runtime in runtimes:
                runtime.begin_micro_batch(number, last=upcoming is missing)
            yield current
            current, number = upcoming, number + 1
    finally:
        for runtime in runtimes:
            runtime.begin_micro_batch(0, last=True)


def join(model: nn.Module | Sequence[nn.Module], batches: Iterable[Item]) -> Iterator[Item]:
    """Iterate over batches when ranks may have different numbers of them, like DDP's ``join``.

    A rank that runs out of batches repeats its last batch, so that it takes part in every exchange. Its gradients then
    count as zero, and means are still over all ranks. Iteration ends on all ranks together. A batch costs 16 bytes. The
    loop may take keys out of a batch: a repeated one has them again.

    Args:
        model: A sharded model, or several that are trained on the same batches by the same ranks.
        batches: Batches of this rank, at least one.

    Raises:
        UsageError: On every rank, if one of them has no batch at all and another one has, or if a batch is an iterator,
            which cannot be repeated.
    """
    return joined(_runtimes_of(model), batches)


def join_islands(model: nn.Module) -> None:
    """Exchange everything with the other islands now, so that all of them hold the same parameters. Collective over all
    islands; it does nothing without islands.

    Call it after the last step of training, and where islands may not differ, for example before an evaluation of the
    model that they make together. Exchanges that are under way end first.

    Args:
        model: A sharded model.
    """
    runtime_of(model).join_islands()


def enter_islands(model: nn.Module, optim: ShardedOptimizer | None, *, island: int, lighthouse: str) -> int:
    """Begin to train with the islands that are there, under a plan with ``islands.elastic``. Collective over the ranks
    of this island.

    If other islands are ahead, the model, the outer momentum and the number of steps become theirs, and so does the
    inner optimizer's state if it is new. So may every later exchange for which this island comes too late:
    :func:`num_steps` says where training stands.

    Args:
        model: A sharded model.
        optim: Optimizer of the model.
        island: Number of this island, from 0; of several jobs with the same number, each counts.
        lighthouse: ``HOST:PORT`` of ``thinwire lighthouse``.

    Returns:
        Updates made.

    Raises:
        UsageError: The plan's islands are not elastic, or the number or the address cannot be used.
        CollectiveError: The lighthouse does not answer, or too few islands are there, for ``islands.patience``.
        MismatchError: The others have another plan.
    """
    return runtime_of(model).enter_islands(None if optim is None else optim.owned, island, lighthouse)


def num_steps(model: nn.Module) -> int:
    """Optimizer steps that a sharded model has made, or that an island had made whose state it has fetched."""
    return runtime_of(model).num_steps


def take_exchanges(model: nn.Module) -> list[Exchanged]:
    """How the exchanges of an elastic island since the last call went; none under other plans."""
    exchanges = runtime_of(model).exchanges
    return exchanges.take_log() if isinstance(exchanges, ElasticExchanges) else []


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsharded model on every rank: fp32 masters and buffers, as plain CPU tensors. Extra
    states of modules are returned as they are.

    Collective. Parameters are gathered one at a time; each rank needs memory for all of them.

    Args:
        model: A sharded model.
    """
    runtime_of(model).refuse_half_loaded()
    return {name: whole_value(value, keep=True) for name, value in model.state_dict().items()}


def save(
    model: nn.Module,
    optim: Optimizers,
    path: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    frozen: str | Path | None = None,
) -> None:
    """Write a checkpoint directory atomically: after a crash, the previous checkpoint is still valid.

    Parameters that were frozen when the model was sharded are written once, by the first save, to a directory
    ``frozen-HASH`` that checkpoints refer to by the CRC-32 of each parameter.

    Args:
        model: A sharded model.
        optim: Optimizer of the model, several that update different parameters, or ``None`` to save only parameters.
            They are made by :func:`optimizer` or from ``model.parameters()``.
        path: Directory of the checkpoint, on a file system that all ranks share; an existing checkpoint is replaced.
        extra: Further JSON values to save, such as the position in the data; equal on every rank.
        frozen: Directory in which ``frozen-HASH`` is; default: the one that ``path`` is in. With ``"reference"``,
            frozen parameters are stored nowhere: a load compares those that the model has, from the files that the run
            began with, by their checksums.

    Raises:
        CheckpointError: A rank has failed. Raised on every rank.
    """
    saving.save([(model, states_of(model, optim))], path, extra, frozen=frozen)


def async_save(
    model: nn.Module,
    optim: Optimizers,
    path: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    limit: float | None = None,
    frozen: str | Path | None = None,
) -> PendingSave:
    """Write a checkpoint as :func:`save` does, but in the background: training goes on after a copy to host memory.

    The copy has the size of what this rank saves. Its memory is kept for the next save until
    ``thinwire.collectives.group.shutdown()``. One checkpoint is written at a time: a save or a load first waits for the
    save before. So does ``shutdown()``; ``torch.distributed.destroy_process_group()`` does not, so ask for the result
    before it.

    Args:
        model: A sharded model.
        optim: See :func:`save`.
        path: Directory of the checkpoint; an existing checkpoint is replaced once the new one is complete.
        extra: Further JSON values to save, such as the position in the data; equal on every rank.
        limit: Seconds that the save may take, for file systems that may hang. A save that takes longer on any rank
            fails on all: ``failed`` of the future turns true, the next save or load raises the error, and the
            checkpoint does not appear later. Without a limit, ranks wait for as long as it takes.
        frozen: See :func:`save`. Frozen parameters are copied by the first save alone.

    Returns:
        A ``concurrent.futures.Future``. Its ``result()`` waits until the checkpoint is complete on disk, and raises a
        ``CheckpointError`` on every rank if a rank has failed. If no rank asks, the next save or load raises that
        error, and ``shutdown()`` logs it.

    Raises:
        CheckpointError: The save before has failed, and no rank has asked for its result. Raised on every rank.
    """
    return saving.start_saving([(model, states_of(model, optim))], path, extra, limit=limit, frozen=frozen)


def load(model: nn.Module, optim: Optimizers, path: str | Path) -> dict[str, Any]:
    """Read a checkpoint that was written under any plan and on any number of ranks.

    Each rank reads the blocks that it needs once, and compares each with its checksum before it copies the values. A
    checkpoint that is missing, cut short, or does not fit leaves the model as it was. If a corrupt block or an error of
    the disk shows later, the model is half loaded: until a load succeeds, its forward, steps, saves and
    :func:`full_state_dict` raise an error, and its optimizer has no state.

    Args:
        model: A sharded model with the same shapes.
        optim: Optimizer of the model, of the same class as the saved one and with the same parameters in each of its
            groups, which may have another order; or several in the same order; or ``None`` to load only parameters.
        path: Directory of the checkpoint.

    Returns:
        The ``extra`` values of the checkpoint.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or corrupt, or does not fit the model or the optimizer.
            Raised on every rank.
    """
    return loading.load([(model, states_of(model, optim))], path)


def progress(model: nn.Module, share: float) -> None:
    """Report the progress of training before a step. Plans with ``wire.compress_until`` below 1 or an
    ``islands.schedule`` require this.

    Args:
        model: A sharded model.
        share: Share of training that is done, from 0 to 1; the same on every rank.

    Raises:
        UsageError: The share is below 0 or above 1.
    """
    runtime_of(model).progress(share)


@contextlib.contextmanager
def full_parameters(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Keep whole, up-to-date parameters on every rank inside the block, in compute dtype, for export or for other code.
    Collective.

    Args:
        model: A sharded model.
        write: Whether to keep changes to the parameters; every rank must make the same changes. Elements that are not
            changed keep their fp32 values.

    Raises:
        UsageError: Parameters were written without ``write``.
    """
    with runtime_of(model).full_parameters(write=write):
        yield


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let a method of a sharded model run like its forward: parameters are gathered, inputs are cast, and hooks run.

    An unregistered method that computes with parameters of the root module gathers each of them on every use.
    Parameters of the submodules that it calls are gathered as usual.

    Args:
        model: A sharded model.
        name: Name of the method, for example ``"loss"`` or ``"generate_step"``.

    Raises:
        UsageError: The model has no such method.
    """
    runtime = runtime_of(model)
    method = getattr(model, name, None)
    if not callable(method):
        raise UsageError(f"{type(model).__name__} has no method {name!r}")
    setattr(model, name, as_forward(model, method))
    runtime.methods = [*runtime.methods, name]


def traffic(model: nn.Module) -> dict[str, dict[str, int]]:
    """Bytes that this rank has sent since the last call, inside its node and across nodes: ``{"gather": {"inside": ...,
    "across": ...}, "reduce": ..., "sync": ..., "spread": ..., "control": ...}``."""
    taken = sharded_of(model).meter.take()
    return {str(lane): {str(scope): sent[scope] for scope in Scope} for lane, sent in taken.items()}


def exposed(model: nn.Module) -> dict[str, float]:
    """Seconds that computation waited for each lane since the last call: ``{"gather": ..., "reduce": ...,
    "sync": ..., "spread": ...}``, and on CPUs ``"control"``. On GPUs, times are taken from the first call on, and waits
    that the device has not reached yet are counted by the next call."""
    return {str(lane): seconds for lane, seconds in sharded_of(model).lanes.exposed().items()}


def worked(model: nn.Module) -> dict[str, dict[str, float]]:
    """Seconds that each lane worked since the last call: ``{"gather": {"transfer": ..., "codec": ...}, ...}``.
    Transfers include waiting for peers. A lane may transfer and encode at the same time. On GPUs, see
    :func:`exposed`."""
    return {str(lane): seconds for lane, seconds in sharded_of(model).lanes.worked().items()}


@contextlib.contextmanager
def timeline(model: nn.Module) -> Iterator[Timeline]:
    """Record the work of every lane, and the work and the waits of computation, on this rank.

    To view the result in Perfetto, pass the spans of some ranks to :func:`thinwire.program.timeline.chrome_trace`.

    Yields:
        The timeline, which is complete after the block.
    """
    recorder = sharded_of(model).lanes.recorder
    recorded = recorder.start()
    try:
        yield recorded
    finally:
        recorder.stop()


def runtime(model: nn.Module) -> Runtime:
    """The runtime of a sharded model, for tools that inspect it."""
    return runtime_of(model)

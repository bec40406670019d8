"""The interface: shard a model, train it as one trains any PyTorch model, save it, load it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from thinwire.collectives import group as groups
from thinwire.errors import UsageError
from thinwire.program.timeline import Timeline
from thinwire.sharding import snapshot
from thinwire.sharding.build import build
from thinwire.sharding.clip import clip_grad_norm_
from thinwire.sharding.hooks import as_forward
from thinwire.sharding.memory.initial import InitialValues
from thinwire.sharding.modules.discover import Selection, ignore
from thinwire.sharding.optim import ShardedOptimizer, build_optimizer
from thinwire.sharding.parts import join_parts
from thinwire.sharding.runtime import Runtime, runtime_of, sent_bytes
from thinwire.sharding.shares.tensor import ShareTensor
from thinwire.sharding.written import Written
from thinwire.spec import Plan

__all__ = [
    "clip_grad_norm_",
    "exposed",
    "full_parameters",
    "full_state_dict",
    "ignore",
    "join",
    "load",
    "micro_batches",
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
) -> Module:
    """Shard a model's parameters, gradients and optimizer states by a plan, in place.

    Call it on every rank, before the optimizer is made. From then on ``model.parameters()`` gives this rank's shares of
    the fp32 masters (:class:`~thinwire.sharding.shares.parameter.ShardedParameter`): read them, write to them, take
    their ``.grad``, give them to any optimizer. Inside forward and backward, modules see whole tensors in the plan's
    compute dtype. Updated parameters travel while the next forward runs. Joins the job described by torchrun's
    environment if ``torch.distributed`` is not initialised yet.

    You may shard parts first, each under the same plan, and then the model (``for block in model.layers:
    tw.shard(block, plan)``, ``tw.shard(model, plan)``): the parts become its units.

    Args:
        model: any module with materialised parameters on one device; or with all of them on the meta device, and then
            new parameters take their places.
        plan: the plan; its mesh has as many ranks as the job.
        units: what is gathered, freed and reduced together: modules or their names, or a predicate on ``(name,
            module)``. By default the elements of the model's module lists, large leaves outside them, and the rest.
        sync_initial: start from rank 0's parameters and buffers; otherwise ranks must have equal ones.
        codec_backend: one of :data:`thinwire.codecs.BACKENDS`; the device's own unless said.
        values: where a model on the meta device gets its values. Each rank reads what it keeps, one flat buffer at a
            time: none holds the whole model, unless the plan says so.
        device: where a model on the meta device will live.

    Returns:
        The same object.

    Raises:
        SpecError: if the plan asks for what this runtime or this job cannot do.
        MismatchError: if ranks have different plans or models.
        UsageError: if the model cannot be sharded.
    """
    if not groups.is_initialized():
        groups.init()
    units = join_parts(model, plan, units)
    build(
        model,
        plan,
        units,
        sync_initial=sync_initial,
        codec_backend=codec_backend,
        values=values,
        device=None if device is None else torch.device(device),
    )
    return model


def optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    param_groups: Iterable[Mapping[str, Any]] | None = None,
    skip_nonfinite: bool = False,
    **options: Any,
) -> ShardedOptimizer:
    """Make any torch optimizer over this rank's share of the fp32 masters.

    Args:
        model: a sharded model.
        optimizer_class: for example ``torch.optim.AdamW``. One that updates whole tensors (Muon, Adafactor) needs
            ``partition = "inter"`` and unsharded parameters; this is found out by trying, not by name.
        param_groups: as torch takes them; ``params`` may also be name patterns such as ``"*norm*"``. Parameters in no
            group get the defaults.
        skip_nonfinite: leave the parameters alone when the gradient norm is NaN or infinite.
        **options: passed on, for example ``lr=3e-4, fused=True``.

    Returns:
        An optimizer; its ``step`` updates the share and starts spreading it.
    """
    return build_optimizer(
        model, optimizer_class, param_groups=param_groups, skip_nonfinite=skip_nonfinite, options=options
    )


def micro_batches(model: nn.Module, batches: Iterable[Item]) -> Iterator[Item]:
    """Iterate over the micro-batches of one step. The runtime then knows which one is the last.

    Gradients add up over micro-batches, as in PyTorch: divide each loss by their number for a mean.
    """
    runtime = runtime_of(model)
    iterator = iter(batches)
    try:
        upcoming = next(iterator)
    except StopIteration:
        return
    number, more = 0, True
    try:
        while more:
            current = upcoming
            try:
                upcoming = next(iterator)
            except StopIteration:
                more = False
            runtime.begin_micro_batch(number, last=not more)
            yield current
            number += 1
    finally:
        runtime.begin_micro_batch(0, last=True)


def join(model: nn.Module, batches: Iterable[Item]) -> Iterator[Item]:
    """Iterate over batches of which ranks may have different numbers, as DDP's ``join`` allows.

    A rank that has run out goes on with its last batch, so that it takes part in every exchange; its gradients count as
    zero, and the mean is still over all ranks. Iteration ends on all ranks together. Ranks exchange 8 bytes for each
    batch.

    Args:
        model: a sharded model.
        batches: this rank's, at least one.

    Raises:
        UsageError: a rank has no batch at all.
    """
    runtime = runtime_of(model)
    ranks, iterator = groups.control(runtime.part.data.ranks), iter(batches)
    missing = object()
    last: Any = missing
    try:
        while True:
            current = next(iterator, missing)
            if ranks.all_reduce_mean([float(current is not missing)])[0] == 0.0:
                return
            if current is missing and last is missing:
                raise UsageError(f"rank {ranks.rank} has no batch for thinwire.join: give every rank at least one")
            runtime.passes.backward.gradients_count = current is not missing
            last = last if current is missing else current
            yield last
    finally:
        runtime.passes.backward.gradients_count = True


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the unsharded model, on every rank: fp32 masters and buffers as plain tensors on the CPU.

    Collective. Parameters are gathered one at a time; each rank needs memory for all of them.

    Args:
        model: a sharded model.
    """
    runtime_of(model)
    whole: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            plain = value.full_tensor() if isinstance(value, ShareTensor) else value
            whole[name] = plain.detach().cpu().clone() if plain is value else plain.cpu()
    return whole


def save(
    model: nn.Module, optim: ShardedOptimizer | None, path: str | Path, *, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint directory, atomically: a crash leaves the previous one valid.

    Args:
        model: a sharded model.
        optim: its optimizer, or ``None`` for parameters only.
        path: the directory; replaced if it is a checkpoint already.
        extra: what else to keep, as JSON (position in the data, and so on); equal on every rank.

    Raises:
        CheckpointError: on every rank, if any rank fails.
    """
    snapshot.save([(model, optim)], Path(path), extra)


def load(model: nn.Module, optim: ShardedOptimizer | None, path: str | Path) -> dict[str, Any]:
    """Read a checkpoint written under any plan and on any number of ranks.

    Args:
        model: a sharded model of the same shapes.
        optim: its optimizer, of the class it was saved with; or ``None`` for parameters only.
        path: the directory.

    Returns:
        What was saved as ``extra``.

    Raises:
        CheckpointError: on every rank, if it is missing, incomplete or corrupt, or does not fit.
    """
    return snapshot.load([(model, optim)], Path(path))


def progress(model: nn.Module, share: float) -> None:
    """Say how much of training is done, before a step; asked for by plans with ``wire.schedule`` below 1.

    Args:
        model: sharded by :func:`shard`.
        share: 0 at the start, 1 at the end; the same on every rank.
    """
    runtime_of(model).progress(share)


@contextlib.contextmanager
def full_parameters(model: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Whole, up-to-date parameters on every rank, in compute dtype, for export or for other code. Collective.

    Args:
        model: a sharded model.
        write: keep what is written to the parameters in the block; every rank has to write the same. Elements that
            nobody changes keep their fp32 values.

    Raises:
        UsageError: parameters were written without ``write``.
    """
    runtime = runtime_of(model)
    runtime.holds.gather_all()
    written = Written(runtime)
    try:
        yield
        written.settle(keep=write)
    finally:
        runtime.audit.excuse()
        runtime.holds.release_all()


def register_forward_method(model: nn.Module, name: str) -> None:
    """Have a method of a sharded model work as its forward does: parameters are gathered, inputs are cast, and hooks
    run.

    Without it, a method that computes with parameters of the root module gathers each of them anew (parameters of
    submodules that it calls are gathered as usual).

    Args:
        model: a sharded model.
        name: of the method, for example ``"loss"`` or ``"generate_step"``.

    Raises:
        UsageError: the model has no such method.
    """
    runtime_of(model)
    method = getattr(model, name, None)
    if not callable(method):
        raise UsageError(f"{type(model).__name__} has no method {name!r}")
    setattr(model, name, as_forward(model, method))


def traffic(model: nn.Module) -> dict[str, dict[str, int]]:
    """Bytes this rank has sent since the last call: ``{"gather": {"inside": ..., "across": ...}, "reduce": ...,
    "sync": ..., "spread": ..., "control": ...}``, inside its node and across nodes."""
    return sent_bytes(runtime_of(model))


def exposed(model: nn.Module) -> dict[str, float]:
    """Seconds computation stood still for each lane since the last call: ``{"gather": ..., "reduce": ...,
    "sync": ..., "spread": ...}``."""
    return {str(lane): seconds for lane, seconds in runtime_of(model).lanes.exposed().items()}


def worked(model: nn.Module) -> dict[str, dict[str, float]]:
    """Seconds each lane worked since the last call: ``{"gather": {"transfer": ..., "codec": ...}, ...}``. Transfers
    include waiting for peers; a lane may transfer and encode at the same time."""
    return {str(lane): seconds for lane, seconds in runtime_of(model).lanes.worked().items()}


@contextlib.contextmanager
def timeline(model: nn.Module) -> Iterator[Timeline]:
    """Record when every lane worked, what computation did and what it waited for, on this rank.

    Give the spans of some ranks to :func:`thinwire.program.timeline.chrome_trace` to look at them in Perfetto.

    Yields:
        The timeline; complete when the block is left.
    """
    lanes = runtime_of(model).lanes
    recorded = lanes.start_timeline()
    try:
        yield recorded
    finally:
        lanes.stop_timeline()


def runtime(model: nn.Module) -> Runtime:
    """The runtime of a sharded model, for tools that look inside."""
    return runtime_of(model)

"""Trains a model that is split over a grid of ranks: steps, clipping, checkpoints and measurements of all its parts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from thinwire.agreement import Typed
from thinwire.checkpoint.background import PendingSave
from thinwire.collectives import group as groups
from thinwire.collectives.group import Control
from thinwire.collectives.topology import DataRanks
from thinwire.errors import SpecError, UsageError
from thinwire.intercept import AxisTraffic, axis_traffic, step_scope
from thinwire.network.order import order_ranks
from thinwire.parallel.context import Context, share_context
from thinwire.parallel.divisible import Divisible, blocks_of_stages, divisible
from thinwire.parallel.experts import expert_modules, share_experts
from thinwire.parallel.grid import Grid
from thinwire.parallel.optimizer import ParallelOptimizer
from thinwire.parallel.tensor import cast_parts, tensor_axis, vocabulary_parallel_loss
from thinwire.sharding import api
from thinwire.sharding.build import build
from thinwire.sharding.checkpointing import loading, saving
from thinwire.sharding.checkpointing.stored_parameters import ModelAndOptimizer
from thinwire.sharding.checks import check_arguments
from thinwire.sharding.memory.initial import InitialValues
from thinwire.sharding.memory.local import LocalPart
from thinwire.sharding.optimizer.making import build_optimizer, names_of
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.runtime.averaging import Average, average_of
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.sharding.step.loss_scale import LossScale
from thinwire.spec import Plan
from thinwire.spec.cut import STAGES_OF_A_RANK

if TYPE_CHECKING:
    from thinwire.parallel.pipeline import Pipeline

_NAMES: Final[Typed[list[str]]] = Typed(list[str])

Loss = Callable[[Tensor, Tensor], Tensor]


class TokenBatch(Protocol):
    """A micro-batch of one data-parallel rank."""

    @property
    def input_ids(self) -> Tensor:
        """Token ids, int64, ``(B, T)``."""

    @property
    def labels(self) -> Tensor:
        """The token after each input, int64, ``(B, T)``; -100 does not count."""


class ParallelModel:
    """The part of a model that one rank trains; made by :func:`parallelize`.

    Attributes:
        plan: The plan.
        grid: Position of this rank.
        chunks: Sharded parts of the model: one for each pipeline stage of this rank; with ``ep``, the model without its
            experts, and this rank's experts.
        decides_on_device: Whether the device can skip an update, so that the host need not read the norm before it goes
            on.
        mesh: torch's mesh with axes ``pp``, ``dp`` and ``tp``; ``None`` if all ranks are data-parallel.
    """

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        chunks: Sequence[nn.Module],
        mesh: DeviceMesh | None,
        pipeline: Pipeline | None,
        loss: Loss,
    ) -> None:
        self.plan, self.grid, self.chunks, self.mesh = plan, grid, tuple(chunks), mesh
        self._pipeline, self._loss = pipeline, loss
        apart = grid.tp * grid.pp * grid.ep > 1
        self._whole = groups.control(grid.model_ranks) if apart else None
        self._device = next(self.chunks[0].parameters()).device
        self._loss_scale: LossScale | None = None
        self._meshes: tuple[DeviceMesh, ...] = () if mesh is None else (mesh,)
        self._context: Context | None = None
        self.decides_on_device = len(chunks) == 1 and runtime_of(chunks[0]).decides_on_device

    @property
    def knows_loss(self) -> bool:
        """Whether this rank has the last stage. Other ranks return a loss of zero."""
        return self._pipeline is None or self._pipeline.holds_last

    def step(self, batches: Sequence[TokenBatch]) -> Tensor:
        """Run forward and backward of a step's micro-batches. Gradients add up to those of their mean loss.

        Args:
            batches: ``plan.micro_batches`` micro-batches, the same on all ranks that hold one replica together. In a
                pipeline they have one size.

        Returns:
            Mean loss, fp32, on the device; zero if this rank does not know it.

        Raises:
            UsageError: There is no micro-batch, or a pipeline gets others than it was made for.
        """
        self._refuse(batches)
        with self._exchanging(), step_scope() if self._meshes else contextlib.nullcontext():
            scale = self._loss_scale
            tokens = _on_device(batches, self._device)
            if self._pipeline is not None:
                ids, labels = map(torch.cat, zip(*tokens, strict=True))
                return self._pipeline.step(ids, labels, scale)
            total = torch.zeros((), dtype=torch.float32, device=self._device)
            runtimes = [runtime_of(chunk) for chunk in self.chunks]
            for ids, labels in api.micro_batches_of(runtimes, tokens):
                loss = self._mean_loss(ids, labels) / len(batches)
                (loss if scale is None else scale.scale(loss)).backward()
                total += loss.detach()
            return total

    @torch.no_grad()
    def evaluate(self, batch: TokenBatch) -> Tensor:
        """Mean loss of a micro-batch, without gradients; zero if this rank does not know it."""
        with self._exchanging():
            ((ids, labels),) = _on_device([batch], self._device)
            return self._mean_loss(ids, labels) if self._pipeline is None else self._pipeline.evaluate(ids, labels)

    def train(self, mode: bool = True) -> None:
        """Switch all parts between training and evaluation mode."""
        for chunk in self.chunks:
            chunk.train(mode)

    def optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        skip_nonfinite: bool = False,
        loss_scale: LossScale | None = None,
        **options: Any,
    ) -> ParallelOptimizer:
        """Make an optimizer over this rank's shares; see :func:`thinwire.optimizer`.

        Args:
            optimizer_class: For example ``torch.optim.AdamW``.
            param_groups: Groups of parameters, by names or patterns of the whole model's parameters or as parameters of
                this rank's parts.
            skip_nonfinite: Whether to leave all parts unchanged if the gradient norm is NaN or infinite.
            loss_scale: Scale of the losses, which plans with float16 need; :meth:`step` multiplies losses by it, and
                returns them without it.
            **options: Options of the optimizer.

        Raises:
            UsageError: See :func:`thinwire.optimizer`. A pattern may match in only some parts of the model.
        """
        if loss_scale is not None:
            loss_scale.belong_to(self.chunks[0])
        by_part = _groups_by_part(self.chunks, self._whole, list(param_groups or ()))
        made = [
            build_optimizer(
                chunk,
                optimizer_class,
                param_groups=wanted,
                skip_nonfinite=skip_nonfinite,
                loss_scale=loss_scale,
                options=options,
            )
            for chunk, wanted in zip(self.chunks, by_part, strict=True)
        ]
        self._loss_scale = loss_scale
        return ParallelOptimizer(made, self._whole)

    def average(self, *, decay: float | None = None, window: int | None = None) -> Average:
        """Average the weights of this rank's parts; see :func:`thinwire.average`."""
        return average_of([runtime_of(chunk) for chunk in self.chunks], decay=decay, window=window)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Returns:
            The norm before scaling; see :func:`thinwire.clip_grad_norm_`.
        """
        runtimes = [runtime_of(chunk) for chunk in self.chunks]
        norm = _norm(runtimes, self._whole)
        for runtime in runtimes:
            runtime.clip_gradients(norm, max_norm)
        return norm.float()

    def join_islands(self) -> None:
        """Give all islands the same parameters; see :func:`thinwire.join_islands`."""
        for chunk in self.chunks:
            api.join_islands(chunk)

    def progress(self, share: float) -> None:
        """Tell codecs the completed fraction of training; see :func:`thinwire.progress`."""
        for chunk in self.chunks:
            api.progress(chunk, share)

    def save(
        self,
        optim: ParallelOptimizer | None,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        frozen: str | Path | None = None,
    ) -> None:
        """Write a checkpoint of the whole model; see :func:`thinwire.save`."""
        saving.save(_trained(self, optim), path, extra, frozen=frozen)

    def async_save(
        self,
        optim: ParallelOptimizer | None,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        then: Callable[[], None] | None = None,
        limit: float | None = None,
        copies: bool = True,
        frozen: str | Path | None = None,
    ) -> PendingSave:
        """Write a checkpoint of the whole model in the background, and return its future; see
        :func:`thinwire.async_save`.

        The writing thread of this rank calls ``then`` once the checkpoint is complete. Nothing is copied without
        ``copies``, for a caller that waits for the save.
        """
        parts = _trained(self, optim)
        return saving.start_saving(parts, path, extra, then, limit=limit, copies=copies, frozen=frozen)

    def load(self, optim: ParallelOptimizer | None, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint written under any plan and on any grid; see :func:`thinwire.load`."""
        return loading.load(_trained(self, optim), path)

    def axis_traffic(self) -> dict[str, AxisTraffic]:
        """Traffic of this rank on the axes ``tp``, ``pp``, ``ep`` and ``cp`` since the last call."""
        return {axis: sent for mesh in self._meshes for axis, sent in axis_traffic(mesh, reset=True).items()}

    def _refuse(self, batches: Sequence[TokenBatch]) -> None:
        """Refuse a step of other micro-batches than it can run."""
        count = self.plan.micro_batches
        if not batches:
            raise UsageError(f"step(batches) got no micro-batch; give plan.micro_batches = {count} of them")
        sizes = [tuple(batch.input_ids.shape) for batch in batches]
        if self._pipeline is not None and (len(sizes) != count or len(set(sizes)) > 1):
            raise UsageError(
                f"step(batches) got micro-batches of sizes {sizes}, and the pipeline runs plan.micro_batches = {count} "
                "of one size: leave out the last batches of an epoch, as DataLoader(drop_last=True) does"
            )

    def _mean_loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.grid.tp > 1:
            return self._loss(self.chunks[0](ids).logits, labels)
        # Experts are the last part, whose forward runs the others.
        if self._context is None:
            loss: Tensor = self.chunks[-1](input_ids=ids, labels=labels).loss
            return loss
        ids, labels, share = self._context.part(ids, labels)
        mean: Tensor = self.chunks[-1](input_ids=ids, labels=labels).loss
        return mean * share

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Context of exchanges of activations: explains errors of the transport, and computes losses by vocabulary."""
        if not self._meshes:
            yield
            return
        by_vocabulary = loss_parallel() if self.grid.tp > 1 else contextlib.nullcontext()
        with groups.explained_transport("exchanging activations", self.grid.neighbours), by_vocabulary:
            yield


def _trained(model: ParallelModel, optim: ParallelOptimizer | None) -> list[ModelAndOptimizer]:
    """The parts of a model, each with its optimizer."""
    parts: Sequence[ShardedOptimizer | None] = [None] * len(model.chunks) if optim is None else optim.parts
    return list(zip(model.chunks, parts, strict=True))


def _groups_by_part(
    chunks: Sequence[nn.Module], everyone: Control | None, wanted: Sequence[Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Split parameter groups by part, with the names of each part's parameters."""
    by_part = [{id(parameter): name for name, parameter in chunk.named_parameters()} for chunk in chunks]
    here = {key: name for part in by_part for key, name in part.items()}
    everywhere = [list(here.values())] if everyone is None else everyone.all_gather_typed(list(here.values()), _NAMES)
    every_name = list(dict.fromkeys(name for names in everywhere for name in names))
    cut: list[list[dict[str, Any]]] = [[] for _ in by_part]
    for number, group in enumerate(wanted):
        chosen = names_of(group, here, every_name, number)
        for part, of_part in zip(by_part, cut, strict=True):
            of_part.append({**group, "params": [name for name in part.values() if name in chosen]})
    return cut


def _norm(runtimes: Sequence[Runtime], whole: groups.Control | None) -> Tensor:
    """Norm of the gradient of all parts of a model, 0-D, fp64."""
    norms = [runtime.close_step(measure=True).norm for runtime in runtimes]
    if whole is None and len(norms) == 1:
        return norms[0]
    squares = [float(norm.square()) for norm in norms]
    # Beside experts, the rest of the model is the same on all of these ranks, and counts once.
    inner = [runtime.is_inner for runtime in runtimes]
    common = sum(square for square, of_experts in zip(squares, inner, strict=True) if any(inner) and not of_experts)
    apart = sum(squares) - common
    if whole is not None:
        apart = whole.all_reduce_mean([apart])[0] * whole.size
    return torch.tensor(common + apart, dtype=torch.float64, device="cpu").sqrt()


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Loss | None = None,
    encoded: bool = True,
    codec_backend: str | None = None,
    values: InitialValues | None = None,
    device: torch.device | None = None,
) -> ParallelModel:
    """Split a model over all ranks of the job into stages and matrices, and shard each part as the plan says.

    Every rank calls this with the same model, that is, with equal shapes and values. Without ``tp`` and ``pp``, it
    equals :func:`thinwire.shard` with the conveniences of a :class:`ParallelModel`.

    Args:
        model: fp32 model; for ``tp`` or ``pp`` above 1 a :class:`~thinwire.parallel.Divisible`, which is changed in
            place.
        plan: Plan whose mesh times ``tp`` times ``pp`` has as many ranks as the job. With ``ep`` above 1, the model
            needs experts; see :func:`thinwire.parallel.experts.expert_modules`. With ``cp`` above 1, it has to be a
            :class:`~thinwire.parallel.context.SharesContext`.
        loss: Mean loss of logits ``(B, T, V)`` and labels; needed for ``pp`` above 1 without ``tp``.
        encoded: Whether ``tp`` and ``pp`` send through their codecs (also through ``none``) and count bytes. Otherwise,
            torch's own groups are used.
        codec_backend: See :func:`thinwire.shard`.
        values: Initial values of a model on the meta device; see :func:`thinwire.shard`.
        device: Device for a model on the meta device.

    Raises:
        SpecError: The model or the job does not support the plan.
        UsageError: The model cannot be split.
    """
    check_arguments(model, plan, codec_backend)
    groups.enter()
    control = groups.control()
    here = device or next(model.parameters()).device
    loss = _unknown_loss if loss is None else loss
    plan = order_ranks(plan, control, here).plan
    grid = Grid.of(plan, control.rank, control.size)
    if grid.is_data_parallel:
        api.shard(model, plan, codec_backend=codec_backend, values=values, device=device)
        return ParallelModel(plan, grid, [model], None, None, loss)
    shard_part = partial(build, sync_initial=True, codec_backend=codec_backend, values=values, device=here)
    if grid.ep > 1 or grid.cp > 1:
        return _with_neighbours(model, plan, grid, shard_part, loss, device=here, encoded=encoded)
    if not encoded and not (plan.wire.tp.is_none and plan.wire.pp.is_none):
        raise SpecError("plan", ["wire.tp and wire.pp need encoded = True, or set both to 'none'"])
    per_rank = STAGES_OF_A_RANK[plan.pipeline_schedule] if grid.pp > 1 else 1
    stages = grid.pp * per_rank
    anatomy = divisible(model, plan, stages=stages)
    sequence = plan.sequence_parallel and getattr(anatomy, "cuts_sequences", True)
    dtype: torch.dtype = getattr(torch, plan.compute_dtype)
    mesh = grid.mesh(plan, here, encoded=encoded)
    axis = tensor_axis(mesh)
    ranges = blocks_of_stages(anatomy.num_blocks, stages)
    chunks = []
    for number in range(per_rank):
        index = number * grid.pp + grid.stage
        chunk = model if number == per_rank - 1 else copy.deepcopy(model)
        assert isinstance(chunk, Divisible)
        chunk.keep(ranges[index], first=index == 0, last=index == stages - 1)
        masters = {}
        if grid.tp > 1:
            parallelize_module(chunk, axis, chunk.tensor_parallel_styles(sequence=sequence))
            chunk.sequence_ways = grid.tp if sequence else 1
            chunk.tie()
            masters = cast_parts(chunk, dtype)
        data = DataRanks.of(plan, grid.data_ranks, grid.data_ranks.index(grid.rank), number)
        shard_part(chunk, plan, None, part=LocalPart(data, index, grid.tensor, grid.tp, masters))
        chunks.append(chunk)
    mean_loss = partial(vocabulary_parallel_loss, mesh=axis) if grid.tp > 1 else loss
    pipeline = None
    if grid.pp > 1:
        # Imported here, because torch's pipelining imports its compiler, which takes 100 MiB of each process's memory.
        from thinwire.parallel.pipeline import Pipeline

        pipeline = Pipeline(
            chunks,
            plan,
            mesh.get_group("pp"),
            here,
            mean_loss,
            sequence_ways=grid.tp if sequence else 1,
            width=anatomy.width,
            vocabulary=anatomy.vocabulary // grid.tp,
        )
    return ParallelModel(plan, grid, chunks, mesh, pipeline, mean_loss)


def _with_neighbours(
    model: nn.Module,
    plan: Plan,
    grid: Grid,
    shard_part: Callable[..., Runtime],
    loss: Loss,
    *,
    device: torch.device,
    encoded: bool,
) -> ParallelModel:
    """Share the experts of a model, or sequences, among neighbours. Experts are sharded apart from the rest."""
    for axis, codec in (("ep", plan.wire.ep), ("cp", plan.wire.cp)):
        if not encoded and not codec.is_none:
            raise SpecError("plan", [f"wire.{axis} needs encoded = True, or set it to 'none'"])
    experts = expert_modules(model, plan) if plan.ep > 1 else {}
    parts, meshes, context = [model], [], None
    if plan.cp > 1:
        meshes.append(grid.neighbour_mesh("cp", plan, device, encoded=encoded))
        context = share_context(model, plan, meshes[-1].get_group())
    if experts:
        meshes.append(grid.neighbour_mesh("ep", plan, device, encoded=encoded))
        parts.append(share_experts(model, experts, meshes[-1]))
    masters = cast_parts(parts[1], getattr(torch, plan.compute_dtype)) if experts else {}
    shard_part(model, plan, None, part=LocalPart(DataRanks.of(plan, grid.data_ranks, grid.data)))
    if experts:
        number = grid.data % grid.ep
        alike = grid.data_ranks[number :: grid.ep]  # ranks that hold the same experts
        part = LocalPart(DataRanks(alike, channel=1), 1, number, grid.ep, masters, is_inner=True)
        shard_part(parts[1], plan.for_experts(), list(experts), part=part)
    made = ParallelModel(plan, grid, parts, None, None, loss)
    made._meshes, made._context = tuple(meshes), context
    return made


def _unknown_loss(logits: Tensor, labels: Tensor) -> Tensor:
    raise SpecError("loss", ["a pipeline needs one: thinwire.parallelize(model, plan, loss=...)"])


def _on_device(batches: Sequence[TokenBatch], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of micro-batches on the device.

    On a GPU they arrive in one copy that neither the host nor computation waits for.
    """
    parts = [part for batch in batches for part in (batch.input_ids, batch.labels)]
    tokens = torch.cat([part.flatten() for part in parts])
    if device.type != "cpu":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    there = [flat.view(part.shape) for flat, part in zip(tokens.split([p.numel() for p in parts]), parts, strict=True)]
    return list(zip(there[::2], there[1::2], strict=True))

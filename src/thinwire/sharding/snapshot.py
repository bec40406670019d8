"""Saves a sharded model to a checkpoint, and loads it under any other plan.

Everything is stored per parameter, as flat vectors: ``model/NAME`` in fp32, and ``optimizer/NAME/KEY`` for state of the
parameter's length. State that is one number per parameter (Adam's ``step``) is stored as a value. Two kinds of vectors
are valid only under the plan that wrote them. ``feedback/REDUCTION`` holds the rounding errors of error feedback, rank
after rank; they contain the loss scale, whose state is the value ``loss_scale``. ``held/NAME`` holds the P-shard values
in compute dtype, if the plan spreads differences.

Plans with islands add keys; see :mod:`thinwire.sharding.islands.saved`.

A parameter that tensor parallelism cuts is stored slice by slice, as ``model/NAME@INDEX``. The value ``slices`` holds
the dimension and the number of slices. When a rank loads a parameter, it assembles the slice that it needs. Keys of
values that belong to one part of a model, under tensor or pipeline parallelism, contain the label of the part.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn

from thinwire.agreement import NOTHING, Typed
from thinwire.checkpoint import store
from thinwire.checkpoint.background import BackgroundWriter, PendingSave
from thinwire.checkpoint.manifest import Manifest, VectorEntry
from thinwire.checkpoint.store import Chunk, ShardedVector
from thinwire.collectives.group import Control, before_shutdown, control, control_beside
from thinwire.errors import CheckpointError, SpecError
from thinwire.program import Axis, Lane
from thinwire.sharding.fragments import OwnedFragment
from thinwire.sharding.islands.exchanges import Exchanges
from thinwire.sharding.islands.saved import (
    lost_of,
    own_key,
    own_masters,
    restore_lost,
    resume_turns,
    shared_pieces,
    turns_of,
)
from thinwire.sharding.loss_scale import checked_state
from thinwire.sharding.memory.local import Slice
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.optim import ShardedOptimizer, rescale_lost
from thinwire.sharding.optimizers.state import make_state, state_of
from thinwire.sharding.runtime import Runtime, runtime_of
from thinwire.sharding.stored_values import check_groups, check_values
from thinwire.spec import Plan

__all__ = ["SavedModel", "load", "save", "settle", "start_saving", "wait_for_writer"]

_VALUES: Final[Typed[dict[str, Json]]] = Typed(dict[str, object])
_SIZES: Final[Typed[dict[str, int]]] = Typed(dict[str, int])

log = logging.getLogger("thinwire")

Json = Any
T = TypeVar("T")


Trained = tuple[nn.Module, ShardedOptimizer | None]
"""A sharded model, or a part of one, and its optimizer; ``None`` if the optimizer is neither saved nor loaded."""


_writer: BackgroundWriter | None = None
"""Writes this process's checkpoints in the background; ``None`` before the first one of a job."""

_given_up: list[BackgroundWriter] = []
"""Writers whose last save took longer than its limit. Their groups may have timed out, so each needs a successor."""

_FLAG: Final[Typed[bool]] = Typed(bool)


def save(parts: Sequence[Trained], path: Path, extra: Mapping[str, Json] | None) -> None:
    """Write a checkpoint of everything that the ranks of the job train; see :func:`thinwire.save`.

    Args:
        parts: Parts that this rank trains; the same number on every rank.
        path: Directory of the checkpoint.
        extra: Further JSON values to save.
    """
    settle()
    vectors, values = _collect(parts, extra)
    store.write(path, vectors, values, control=control())


def start_saving(
    parts: Sequence[Trained],
    path: Path,
    extra: Mapping[str, Json] | None,
    then: Callable[[], None] | None = None,
    *,
    limit: float | None = None,
    copies: bool = True,
) -> PendingSave:
    """Begin to write a checkpoint in the background; see :func:`thinwire.async_save`.

    Args:
        parts: Parts that this rank trains; the same number on every rank.
        path: Directory of the checkpoint.
        extra: Further JSON values to save.
        then: What the writing thread of this rank does once the checkpoint is complete.
        limit: Seconds that the save may take; see :func:`thinwire.async_save`.
        copies: False if the caller waits for the save, so that nothing need be copied.

    Returns:
        The save.

    Raises:
        CheckpointError: The save before has failed, or one that was given up still hangs. Raised on every rank.
    """
    global _writer
    settle()
    if _given_up:
        _refuse_beside_hanging(path)
    vectors, values = _collect(parts, extra)
    if _writer is None:
        purpose = f"checkpoint-{len(_given_up)}" if _given_up else "checkpoint"
        beside = control_beside(purpose)
        _writer = BackgroundWriter(beside, beside.close)
        before_shutdown(_close_writer)
    return _writer.start(path, vectors, values, then=then, limit=limit, copies=copies)


def _refuse_beside_hanging(path: Path) -> None:
    """Refuse to begin a save while an earlier one hangs on any rank: memory for another copy would be lost, too."""
    hangs: list[bool] = control().all_gather_typed(any(writer.hangs for writer in _given_up), _FLAG)
    if any(hangs):
        ranks = ", ".join(str(rank) for rank, hanging in enumerate(hangs) if hanging)
        raise CheckpointError(f"{path}: cannot save: an earlier save still waits for the file system on rank {ranks}")


def settle() -> None:
    """Wait until no checkpoint is being written in the background. Collective.

    Raises:
        CheckpointError: The last one failed, and nobody has asked for its result, or it takes longer than its limit.
            Raised on every rank.
    """
    global _writer
    if _writer is None:
        return
    try:
        _writer.settle(control())
    finally:
        if _writer.given_up:
            _given_up.append(_writer)
            _writer = None


def wait_for_writer() -> None:
    """Wait until no checkpoint is being written in the background, however it ends. Exchanges nothing."""
    if _writer is not None:
        _writer.join()


def _close_writer() -> None:
    global _writer
    _given_up.clear()
    if _writer is not None:
        _writer.close()
        _writer = None


def _collect(
    parts: Sequence[Trained], extra: Mapping[str, Json] | None
) -> tuple[dict[str, ShardedVector], dict[str, Json]]:
    """The vectors and the values of a checkpoint."""
    for model, _ in parts:
        runtime_of(model).refuse_half_loaded()
    vectors = _Vectors()
    plan, num_steps = runtime_of(parts[0][0]).plan, runtime_of(parts[0][0]).num_steps
    values: dict[str, Json] = {"plan": plan.to_toml(full=True), "num_steps": num_steps, "extra": dict(extra or {})}
    values["shapes"] = _union({name: shape for model, _ in parts for name, shape in _shapes(model).items()})
    values["slices"] = _union({name: cut for model, _ in parts for name, cut in _cuts(runtime_of(model)).items()})
    for model, optim in parts:
        _save_part(model, optim, vectors, values)
    return vectors.sharded(), values


def _save_part(model: nn.Module, optim: ShardedOptimizer | None, vectors: _Vectors, values: dict[str, Json]) -> None:
    runtime = runtime_of(model)
    runtime.join_spreads()
    first_replica = runtime.axes[Axis.REPLICA, Lane.SYNC].index == 0
    first_holder = first_replica and runtime.axes[Axis.SHARD, Lane.REDUCE].index == 0
    first_tensor = runtime.part.tensor == 0
    island, exchanges = runtime.part.data.island, runtime.exchanges
    fragments = optim.fragments if optim is not None else runtime.sharded.fragments()

    def add(prefix: str, name: str, suffix: str, numel: int, offset: int, tensor: torch.Tensor | None) -> None:
        cut = runtime.slices.get(name)
        if cut is not None:
            vectors.add(_sliced(f"{prefix}/{name}{suffix}", cut.index), numel, offset, tensor)
        else:
            vectors.add(f"{prefix}/{name}{suffix}", numel, offset, tensor if first_tensor else None)

    for name, numel, offset, tensor in _frozen(runtime):
        add("model", name, "", numel, offset, tensor if first_holder and island == 0 else None)
    for name, buffer in _persistent_buffers(model):
        add("buffer", name, "", buffer.numel(), 0, buffer.reshape(-1) if runtime.rank == island == 0 else None)
    if exchanges is not None:
        exchanges.wait()
        for piece in shared_pieces(exchanges, fragments):
            slot = piece.owned.fragment.slot
            add("model", slot.name, "", slot.numel, piece.offset, piece.anchor if island == 0 else None)
            if piece.momentum is not None:
                momentum = piece.momentum if island == 0 else None
                add("outer/momentum", slot.name, "", slot.numel, piece.offset, momentum)
    for owned in fragments:
        slot, offset = owned.fragment.slot, owned.fragment.offset
        value = owned.value.detach().reshape(-1) if first_replica else None
        add("model" if exchanges is None else own_masters(island), slot.name, "", slot.numel, offset, value)
        if runtime.plan.wire.spread_difference:
            add(own_key("held", island), slot.name, "", slot.numel, offset, owned.held if first_replica else None)
        for key, entry in state_of(optim, owned).items():
            if isinstance(entry, torch.Tensor) and entry.dim() > 0:
                as_long = entry.numel() == owned.value.numel()
                numel, begin = (slot.numel, offset) if as_long else (entry.numel(), 0)
                moment = entry.reshape(-1) if first_replica else None
                add(own_key("optimizer", island), slot.name, f"/{key}", numel, begin, moment)
            else:
                number = entry.item() if isinstance(entry, torch.Tensor) else entry
                values[own_key(f"optimizer/{slot.name}/{key}", island)] = number
    runtime.reducer.join()
    _save_lost(own_key("feedback", island), runtime, runtime.reducer.reductions.feedback.lost, vectors, values)
    if exchanges is not None:
        _save_lost("outer/lost", runtime, lost_of(exchanges), vectors, values, everywhere=True)
        values[_of_part("outer", runtime)] = turns_of(exchanges)
        values["islands"] = runtime.plan.job_islands
    if optim is not None:
        if optim.loss_scale is not None:
            values[own_key("loss_scale", island)] = optim.loss_scale.state()
        values["optimizer"] = type(optim.inner).__name__
        values["groups"] = [
            {key: _as_json(value) for key, value in group.items() if key != "params" and _is_json(value)}
            for group in optim.param_groups
        ]


def _save_lost(
    key: str,
    runtime: Runtime,
    lost: Mapping[str, torch.Tensor],
    vectors: _Vectors,
    values: dict[str, Json],
    *,
    everywhere: bool = False,
) -> None:
    """Add rounding errors to a checkpoint, those of one rank after those of another: of the ranks that step together,
    or ``everywhere``, of all islands. Collective."""
    data = runtime.part.data
    ranks = control(data.everyone if everywhere else data.ranks)
    values[_of_part(key, runtime)] = sizes = _sizes_everywhere(ranks, lost)
    for name, of_rank in lost.items():
        vectors.add(_of_part(f"{key}/{name}", runtime), sum(sizes[name]), sum(sizes[name][: ranks.rank]), of_rank)


def load(parts: Sequence[Trained], path: Path) -> dict[str, Json]:
    """Read a checkpoint; see :func:`thinwire.load`.

    Args:
        parts: Parts that this rank trains; the same number on every rank.
        path: Directory of the checkpoint.
    """
    settle()
    for model, _ in parts:
        runtime_of(model).holds.refuse("load()")
    shapes = _union({name: shape for model, _ in parts for name, shape in _shapes(model).items()})
    opened = _everywhere(lambda: _open(shapes, parts, path))
    manifest = opened.manifest
    same_plan = _holds(manifest, runtime_of(parts[0][0]).plan)  # those of other parts follow from it
    loading = [_Loading(model, optim, manifest, path, same_plan=same_plan) for model, optim in parts]
    vectors = _Vectors()
    try:
        # Check on all ranks before any rank reads, so that no rank waits for another that has failed.
        _everywhere(lambda: _want_all(loading, vectors))
        store.read(opened, vectors.sharded(), control=control(), before_filling=lambda: _begin(loading))
    except BaseException:  # whatever it is, the optimizer must not go on with what a load has left
        for part in loading:
            part.undo()
        raise
    for part in loading:
        part.finish()
    return dict(manifest.values["extra"])


def _holds(manifest: Manifest, plan: Plan) -> bool:
    """Whether a checkpoint is of this plan, however the release that wrote it spelled the plan's keys."""
    try:
        return Plan.from_toml(str(manifest.values["plan"])) == plan
    except SpecError:  # of a later release, with keys that this one does not know
        return False


def _begin(loading: Sequence[_Loading]) -> None:
    for part in loading:
        part.begin()


class SavedModel:
    """Reads the parameters and buffers of a checkpoint one at a time, in a single process without a job.

    Args:
        path: Directory of the checkpoint.

    Attributes:
        shapes: Shapes of parameters and persistent buffers, by name.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self._reader = store.Reader(path)
        values = self._reader.manifest.values
        check_values(values, path)
        self.shapes: dict[str, list[int]] = values.get("shapes", {})
        _check_slices(self._reader.manifest, self.shapes, path)
        self._cuts: dict[str, list[int]] = values.get("slices", {})

    def read(self, name: str) -> torch.Tensor:
        """Read a whole parameter or buffer, even if it is stored in slices.

        Args:
            name: A key of :attr:`shapes`.

        Returns:
            Tensor on the CPU, in fp32; frozen parameters and buffers have their own dtype.

        Raises:
            CheckpointError: The tensor cannot be read, or its length does not match its shape.
        """
        key = f"buffer/{name}" if f"buffer/{name}" in self._reader.manifest.vectors else f"model/{name}"
        shape = list(self.shapes[name])
        dim, ways = self._cuts.get(name, (0, 1))
        if name not in self._cuts:
            return self._shaped(key, shape)
        part = [*shape[:dim], shape[dim] // ways, *shape[dim + 1 :]]
        return torch.cat([self._shaped(_sliced(key, index), part) for index in range(ways)], dim)

    def _shaped(self, key: str, shape: list[int]) -> torch.Tensor:
        vector = self._reader.vector(key)
        if vector.numel() != math.prod(shape):
            raise CheckpointError(f"corrupt: {key} has {vector.numel()} elements, and the shape {shape}")
        return vector.view(shape)


def _want_all(loading: Sequence[_Loading], vectors: _Vectors) -> None:
    for part in loading:
        part.want(vectors)


class _Loading:
    """Loads one part. Nothing in the part changes until the checkpoint is known to hold everything it needs; from then
    on, the part is half loaded until the end."""

    def __init__(
        self,
        model: nn.Module,
        optim: ShardedOptimizer | None,
        manifest: store.Manifest,
        path: Path,
        *,
        same_plan: bool,
    ) -> None:
        self._model, self._optim, self._manifest, self._path = model, optim, manifest, path
        self._runtime = runtime = runtime_of(model)
        runtime.join_spreads()
        runtime.zero_grad()
        self._same_plan = same_plan
        self._with_held = runtime.plan.wire.spread_difference and self._same_plan
        self._new = make_state(optim) if optim is not None else []
        self._numbers: list[tuple[dict[str, Any], str, Json]] = []
        self._copies: list[Callable[[], object]] = []
        self._lost: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = {}, {}
        # Islands go on by themselves if there are as many as before; otherwise all start from what they agreed on.
        self._same_islands = manifest.values.get("islands", 1) == runtime.plan.job_islands
        self._island = runtime.part.data.island if self._same_islands else 0
        self._loss_scale: Mapping[str, Json] | None = None

    def want(self, vectors: _Vectors) -> None:
        """Register the vectors to read and their targets.

        Raises:
            CheckpointError: The checkpoint lacks state of the optimizer, or its loss scale is corrupt.
        """
        self._loss_scale = checked_state(self._manifest.values.get(own_key("loss_scale", self._island)))
        stored = _StoredParameters(self._manifest, self._runtime, vectors)
        self._copies = _want_unoptimized(self._model, self._runtime, self._manifest, vectors, stored)
        fragments = self._optim.fragments if self._optim is not None else self._runtime.sharded.fragments()
        exchanges = self._runtime.exchanges
        apart = exchanges is not None and self._same_islands
        for owned in fragments:
            masters = own_masters(self._island) if apart else "model"
            stored.want(masters, owned, "", owned.value.detach().view(-1))
            if self._with_held:
                stored.want(own_key("held", self._island), owned, "", owned.held)
        if exchanges is not None:
            exchanges.wait()
            self._want_shared(exchanges, fragments, stored)
        self._lost = _want_feedback(self._runtime, self._manifest, vectors, same_plan=self._same_plan)
        if self._optim is not None:
            prefix = own_key("optimizer", self._island)
            self._numbers = _want_state(self._optim, self._manifest, stored, self._path, prefix)
        self._copies += stored.copies

    def _want_shared(self, exchanges: Exchanges, fragments: Sequence[OwnedFragment], stored: _StoredParameters) -> None:
        """Register what islands share: what they agreed on last, and the outer momentum, which may be new."""
        for piece in shared_pieces(exchanges, fragments):
            slot = piece.owned.fragment.slot
            stored.want_fragment(f"model/{slot.name}", slot.name, slot.numel, piece.offset, piece.anchor)
            key = f"outer/momentum/{slot.name}"
            if piece.momentum is not None and stored.dtype_of(key) is not None:
                stored.want_fragment(key, slot.name, slot.numel, piece.offset, piece.momentum)
            elif piece.momentum is not None:
                self._copies.append(piece.momentum.zero_)

    def begin(self) -> None:
        """Note that the part and its optimizer will hold values of no single moment until the load has succeeded."""
        self._runtime.half_loaded = (
            f"the model is half loaded: the load of {self._path} failed after it had begun to fill the model; load a "
            "checkpoint, this one or another, before you use the model again"
        )
        if self._optim is not None:
            self._new = list(self._optim.fragments)

    def undo(self) -> None:
        """Remove the optimizer state that was created for loading, or all of it if it is half loaded."""
        for owned in self._new:
            assert self._optim is not None
            self._optim.state.pop(owned.value, None)

    def finish(self) -> None:
        """Put the values that were read into place, and spread them."""
        for copy in self._copies:
            copy()
        for state, key, value in self._numbers:
            if isinstance(state[key], torch.Tensor):
                state[key].fill_(value)
            else:
                state[key] = value
        if self._optim is not None:
            _restore_groups(self._optim, self._manifest.values["groups"])
        runtime = self._runtime
        runtime.reducer.reductions.feedback.lost, outer = self._lost
        self._restore_loss_scale()
        if runtime.exchanges is not None:
            restore_lost(runtime.exchanges, outer)
            turns = self._manifest.values.get(_of_part("outer", runtime), {}) if self._same_islands else {}
            resume_turns(runtime.exchanges, turns)
        # The spread counts as the update of the last saved step.
        runtime.loaded(int(self._manifest.values["num_steps"]), with_replicas=self._with_held)
        runtime.join_spreads()
        runtime.half_loaded = None

    def _restore_loss_scale(self) -> None:
        """Continue with the loss scale of the checkpoint; rounding errors of another scale follow the present one."""
        saved, scale = self._loss_scale, self._runtime.agreements.loss_scale
        if saved is not None and self._optim is not None and scale is not None:
            scale.restore(saved)
        before, present = 1.0 if saved is None else saved["value"], 1.0 if scale is None else scale.value
        rescale_lost(self._runtime, present / before)


def _everywhere(action: Callable[[], T]) -> T:
    """Run an action that does not communicate on every rank; an error on any rank is raised on all."""

    def first(problems: Mapping[int, str]) -> CheckpointError:
        return CheckpointError(next(iter(problems.values())))

    done: list[T] = []
    control().agree(lambda: done.append(action()), first, NOTHING)
    return done[0]


def _union(mine: Mapping[str, Json]) -> dict[str, Json]:
    """Merge the dictionaries of all ranks. Collective."""
    return {key: value for part in control().all_gather_typed(dict(mine), _VALUES) for key, value in part.items()}


def _of_part(key: str, runtime: Runtime) -> str:
    label = runtime.part.label
    return f"{key} of {label}" if label else key


def _open(shapes: Mapping[str, Json], parts: Sequence[Trained], path: Path) -> store.Opened:
    """Read and verify the manifest of a checkpoint, and check that it fits the model and the optimizer."""
    opened = store.open_checkpoint(path)
    manifest = opened.manifest
    check_values(manifest.values, path)
    saved_shapes = manifest.values.get("shapes", {})
    differences = [
        f"{name} is {saved_shapes.get(name, 'missing')} in the checkpoint, {shapes.get(name, 'missing')} in the model"
        for name in {**shapes, **saved_shapes}
        if saved_shapes.get(name) != shapes.get(name)
    ]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(f"{path}: saved from another model: {'; '.join(differences[:3])}{more}")
    _check_slices(manifest, shapes, path)
    optim = parts[0][1]
    if optim is None:
        return opened
    saved, present = manifest.values.get("optimizer"), type(optim.inner).__name__
    alone = "load the parameters alone with thinwire.load(model, None, path)"
    if saved is None:
        raise CheckpointError(f"{path}: saved without an optimizer; {alone}")
    if saved != present:
        raise CheckpointError(f"{path}: saved with optimizer {saved}, loaded into {present}; use {saved}, or {alone}")
    num_saved, num_present = len(manifest.values["groups"]), len(optim.param_groups)
    if num_saved != num_present:
        raise CheckpointError(
            f"{path}: the checkpoint has {num_saved} parameter groups, the optimizer {num_present}; make the optimizer "
            "with the param_groups it was saved with"
        )
    check_groups(manifest.values["groups"], optim.param_groups, path)
    return opened


def _check_slices(manifest: store.Manifest, shapes: Mapping[str, Json], path: Path) -> None:
    """Check that the slices in the manifest match the shapes of the parameters.

    Raises:
        CheckpointError: A parameter cannot have such slices; the error names it.
    """
    slices = manifest.values.get("slices", {})
    for name, cut in slices.items() if isinstance(slices, dict) else [("slices", slices)]:
        shape = shapes.get(name, [])
        dim, ways = cut if isinstance(cut, list) and len(cut) == 2 else (None, None)
        whole = type(dim) is int and type(ways) is int and 0 <= dim < len(shape) and ways > 0
        if not whole or shape[dim] % ways:
            raise CheckpointError(f"{path}: corrupt: its slices of {name}, of shape {shape}, are {cut!r}")


def _want_unoptimized(
    model: nn.Module, runtime: Runtime, manifest: store.Manifest, vectors: _Vectors, parameters: _StoredParameters
) -> list[Callable[[], object]]:
    """Register frozen parameters and buffers for reading, in their stored dtype.

    Returns:
        Functions that copy the values, once they are read, to the parameters and buffers.
    """
    copies: list[Callable[[], object]] = []
    for name, numel, offset, target in _frozen(runtime):
        dtype = parameters.dtype_of(f"model/{name}") or target.dtype
        place = target if dtype == target.dtype else torch.empty(target.numel(), dtype=dtype, device=target.device)
        parameters.want_fragment(f"model/{name}", name, numel, offset, place)
        if place is not target:
            copies.append(functools.partial(target.copy_, place))
    for name, buffer in _persistent_buffers(model):
        entry = manifest.vectors.get(f"buffer/{name}")
        dtype = entry.dtype if entry is not None and entry.dtype is not None else buffer.dtype
        stored = torch.empty(buffer.numel(), dtype=dtype, device=buffer.device)
        vectors.add(f"buffer/{name}", buffer.numel(), 0, stored)
        copies.append(functools.partial(buffer.copy_, stored.view(buffer.shape)))
    return copies


def _want_state(
    optim: ShardedOptimizer, manifest: store.Manifest, parameters: _StoredParameters, path: Path, prefix: str
) -> list[tuple[dict[str, Any], str, Json]]:
    """Register this rank's optimizer state for reading.

    Returns:
        State that is a single number: the dictionary and the key where it belongs, and its value.
    """
    stored = {*(key.partition("@")[0] for key in manifest.vectors), *manifest.values}
    stepped = {key.rpartition("/")[0] for key in stored if key.startswith(f"{prefix}/")}
    numbers = []
    for owned in optim.fragments:
        slot = owned.fragment.slot
        name = f"{prefix}/{slot.name}"
        if name not in stepped:
            optim.state.pop(owned.value, None)
            continue
        for key, entry in state_of(optim, owned).items():
            full = f"{name}/{key}"
            if full not in stored:
                raise CheckpointError(
                    f"{path}: the checkpoint has optimizer state for {slot.name} but none called {key!r}; load it with "
                    "the optimizer options it was saved with"
                )
            if full in manifest.values:
                numbers.append((optim.state[owned.value], key, manifest.values[full]))
            elif entry.numel() == owned.value.numel():
                parameters.want(prefix, owned, f"/{key}", entry.view(-1))
            else:
                parameters.want_fragment(full, slot.name, entry.numel(), 0, entry.view(-1))
    return numbers


class _StoredParameters:
    """Registers fragments of parameters for reading, even if they are stored in other slices than this rank's.

    Attributes:
        copies: Functions that assemble fragments, to be called in order once everything has been read.
    """

    def __init__(self, manifest: store.Manifest, runtime: Runtime, vectors: _Vectors) -> None:
        self._manifest, self._runtime, self._vectors = manifest, runtime, vectors
        self._cuts: dict[str, list[int]] = manifest.values.get("slices", {})
        self.copies: list[Callable[[], object]] = []

    def dtype_of(self, key: str) -> torch.dtype | None:
        """Dtype of a vector or of its slices; ``None`` if there is no such vector."""
        entry = self._manifest.vectors.get(key) or self._manifest.vectors.get(_sliced(key, 0))
        return None if entry is None else entry.dtype

    def want(self, prefix: str, owned: OwnedFragment, suffix: str, target: torch.Tensor) -> None:
        """Register the elements of a fragment, from a vector of its parameter's length."""
        slot = owned.fragment.slot
        self.want_fragment(f"{prefix}/{slot.name}{suffix}", slot.name, slot.numel, owned.fragment.offset, target)

    def want_fragment(self, key: str, name: str, numel: int, offset: int, target: torch.Tensor) -> None:
        """Register elements of this rank's slice of a vector.

        Args:
            key: Key of the vector, without its slice.
            name: Name of the parameter.
            numel: Number of elements in this rank's slice.
            offset: First element, relative to the slice.
            target: 1-D, contiguous; filled once everything has been read and copied.
        """
        mine, cut = self._runtime.slices.get(name), self._cuts.get(name)
        if cut is None and mine is None:
            self._vectors.add(key, numel, offset, target)
        elif mine is not None and cut == [mine.dim, mine.ways]:
            self._vectors.add(_sliced(key, mine.index), numel, offset, target)
        elif target.numel():
            self._assemble(key, self._manifest.values["shapes"][name], mine, cut, offset, target)

    def _assemble(
        self, key: str, shape: list[int], mine: Slice | None, cut: list[int] | None, offset: int, target: torch.Tensor
    ) -> None:
        """Register the rows that a fragment touches, in every slice that stores a part of them.

        A *row* spans the cut dimension and all later dimensions, so it is contiguous in the whole parameter.
        """
        dim = mine.dim if mine is not None else cut[0] if cut is not None else 0
        inner = math.prod(shape[dim + 1 :])
        row = shape[dim] * inner  # elements of a row of the whole parameter
        begin, width = (0, row) if mine is None else (mine.index * row // mine.ways, row // mine.ways)
        ways = 1 if cut is None else cut[1]
        stored_width = row // ways
        if math.prod(shape[:dim]) == 1:  # a single row: slices lie end to end
            for index in range(ways):
                low = max(begin + offset, index * stored_width)
                high = min(begin + offset + target.numel(), (index + 1) * stored_width)
                if low < high:
                    name = key if cut is None else _sliced(key, index)
                    place = target[low - begin - offset : high - begin - offset]
                    self._vectors.add(name, stored_width, low - index * stored_width, place)
            return
        first, last = offset // width, (offset + target.numel() - 1) // width + 1
        rows = torch.empty(last - first, width, dtype=target.dtype, device=target.device)
        for index in range(ways):
            low, high = max(begin, index * stored_width), min(begin + width, (index + 1) * stored_width)
            if low >= high:
                continue
            stored = torch.empty((last - first) * stored_width, dtype=target.dtype, device=target.device)
            name = key if cut is None else _sliced(key, index)
            self._vectors.add(name, math.prod(shape) // ways, first * stored_width, stored)
            piece = stored.view(last - first, stored_width)[:, low - index * stored_width : high - index * stored_width]
            self.copies.append(functools.partial(rows[:, low - begin : high - begin].copy_, piece))
        start = offset - first * width
        self.copies.append(lambda: target.copy_(rows.view(-1)[start : start + target.numel()]))


def _sliced(key: str, index: int) -> str:
    return f"{key}@{index}"


def _cuts(runtime: Runtime) -> dict[str, Json]:
    """Dimension and number of slices of every parameter that tensor parallelism cuts, by name."""
    return {name: [cut.dim, cut.ways] for name, cut in runtime.slices.items() if cut is not None}


class _Vectors:
    """Collects chunks by key."""

    def __init__(self) -> None:
        self._numel: dict[str, int] = {}
        self._chunks: dict[str, list[Chunk]] = {}

    def add(self, key: str, numel: int, offset: int, tensor: torch.Tensor | None) -> None:
        """Add a chunk of a vector; with ``None``, this rank declares the vector but holds none of its elements."""
        self._numel[key] = numel
        chunks = self._chunks.setdefault(key, [])
        if tensor is not None:
            chunks.append(Chunk(offset, tensor))

    def sharded(self) -> dict[str, ShardedVector]:
        """The vectors, by key."""
        return {key: ShardedVector(numel, tuple(self._chunks[key])) for key, numel in self._numel.items()}


def _sizes_everywhere(ranks: Control, lost: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """For each name, the number of elements that each rank keeps for error feedback. Collective."""
    everyone = ranks.all_gather_typed({key: errors.numel() for key, errors in lost.items()}, _SIZES)
    return {key: [sizes[key] for sizes in everyone] for key in lost}


def _want_feedback(
    runtime: Runtime, manifest: store.Manifest, vectors: _Vectors, *, same_plan: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Register this rank's error feedback for reading, if it comes from the same plan; returns targets by reduction,
    and by exchange with other islands."""
    islands, data = runtime.plan.islands, runtime.part.data
    wanted = _want_lost(
        own_key("feedback", data.island),
        runtime,
        data.ranks,
        manifest,
        vectors,
        same_plan=same_plan,
        keeps=runtime.plan.wire.error_feedback,
    )
    outer = _want_lost(
        "outer/lost",
        runtime,
        data.everyone,
        manifest,
        vectors,
        same_plan=same_plan,
        keeps=islands is not None and islands.error_feedback,
    )
    return wanted, outer


def _want_lost(
    key: str,
    runtime: Runtime,
    ranks: Sequence[int],
    manifest: store.Manifest,
    vectors: _Vectors,
    *,
    same_plan: bool,
    keeps: bool,
) -> dict[str, torch.Tensor]:
    stored = manifest.values.get(_of_part(key, runtime), {})
    if not keeps or not stored:
        return {}
    if not same_plan:
        if control().rank == 0:
            log.warning("the checkpoint's error feedback belongs to another plan: error feedback starts from zero")
        return {}
    rank, wanted = sorted(ranks).index(control().ranks[control().rank]), {}
    for number in stored:
        name = _of_part(f"{key}/{number}", runtime)
        sizes = _sizes_of_ranks(stored[number], manifest.vectors.get(name), len(ranks), name)
        wanted[number] = torch.zeros(sizes[rank], device=runtime.arena.device)
        vectors.add(name, sum(sizes), sum(sizes[:rank]), wanted[number])
    return wanted


def _sizes_of_ranks(sizes: Json, vector: VectorEntry | None, ranks: int, name: str) -> list[int]:
    """Check the sizes in the manifest that divide a vector among ranks, before memory is allocated for them."""
    well_formed = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    if not well_formed or vector is None or len(sizes) != ranks or sum(sizes) != vector.numel:
        raise CheckpointError(f"the manifest does not say how {name} is shared out among {ranks} ranks: it is damaged")
    return list(sizes)


def _shapes(model: nn.Module) -> dict[str, Json]:
    """Shapes of the parameters and persistent buffers that a checkpoint of a model holds, by name."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if not is_ignored(parameter)]
    named = [*parameters, *_persistent_buffers(model)]
    return {name: list(tensor.shape) for name, tensor in named}


def _frozen(runtime: Runtime) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Frozen parameters in this rank's P shard: name and length of the parameter, offset in it, values."""
    shard = runtime.axes[Axis.PARAMS, Lane.REDUCE].index
    for unit in runtime.units:
        for buffer in unit.buffers:
            if not buffer.layout.trainable:
                for slot, offset, run in buffer.layout.pieces(shard):
                    part = buffer.shard[run.start : run.start + run.length]
                    yield slot.name, slot.numel, offset, part


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value


def _restore_groups(optim: ShardedOptimizer, saved: list[dict[str, Json]]) -> None:
    for group, values in zip(optim.param_groups, saved, strict=True):
        group.update({key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in values.items()})


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


def _as_json(value: Any) -> Json:
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value

"""What of a sharded model goes into a checkpoint, and back under any other plan.

Everything is stored per parameter, as flat vectors: ``model/NAME`` in fp32, ``optimizer/NAME/KEY`` for state as long
as the parameter. State that is one number per parameter (Adam's ``step``) is stored as a value. What error feedback
owes belongs to the plan that made it: ``feedback/REDUCTION`` holds every rank's, one after the other. Where differences
are spread, so does what ranks hold in place of the masters: ``held/NAME``, in compute dtype.

A parameter that tensor parallelism cuts is stored slice by slice, ``model/NAME@INDEX``, and the value ``slices`` says
along which dimension and in how many; whoever loads it puts together the slice that it needs. What belongs to one part
of a model spread over stages and tensor-parallel ranks has the part's label in its key.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from thinwire.checkpoint import store
from thinwire.checkpoint.manifest import VectorEntry
from thinwire.checkpoint.store import Chunk, ShardedVector
from thinwire.collectives.group import control
from thinwire.errors import CheckpointError
from thinwire.program import Axis, Lane
from thinwire.sharding.fragments import OwnedFragment
from thinwire.sharding.memory.local import Slice
from thinwire.sharding.modules.discover import is_ignored
from thinwire.sharding.optim import ShardedOptimizer
from thinwire.sharding.runtime import Runtime, runtime_of

__all__ = ["SavedModel", "load", "save"]

log = logging.getLogger("thinwire")

Json = Any
T = TypeVar("T")


Trained = tuple[nn.Module, ShardedOptimizer | None]
"""A sharded model, or a part of one, with its optimizer if that is saved or loaded as well."""


def save(parts: Sequence[Trained], path: Path, extra: Mapping[str, Json] | None) -> None:
    """Write a checkpoint of everything that the ranks of the job train; see :func:`thinwire.save`.

    Args:
        parts: this rank's; equally many on every rank.
        path: the directory.
        extra: what else to keep.
    """
    vectors = _Vectors()
    plan, num_steps = runtime_of(parts[0][0]).plan, runtime_of(parts[0][0]).num_steps
    values: dict[str, Json] = {"plan": plan.to_toml(), "num_steps": num_steps, "extra": dict(extra or {})}
    values["shapes"] = _union({name: shape for model, _ in parts for name, shape in _shapes(model).items()})
    values["slices"] = _union({name: cut for model, _ in parts for name, cut in _cuts(runtime_of(model)).items()})
    for model, optim in parts:
        _save_part(model, optim, vectors, values)
    store.write(path, vectors.sharded(), values, control=control())


def _save_part(model: nn.Module, optim: ShardedOptimizer | None, vectors: _Vectors, values: dict[str, Json]) -> None:
    runtime = runtime_of(model)
    runtime.join_spreads()
    first_replica = runtime.axes[Axis.REPLICA, Lane.SYNC].index == 0
    first_holder = first_replica and runtime.axes[Axis.SHARD, Lane.REDUCE].index == 0
    first_tensor = runtime.part.tensor == 0

    def add(prefix: str, name: str, suffix: str, numel: int, offset: int, tensor: torch.Tensor | None) -> None:
        cut = runtime.slices.get(name)
        if cut is not None:
            vectors.add(_sliced(f"{prefix}/{name}{suffix}", cut.index), numel, offset, tensor)
        else:
            vectors.add(f"{prefix}/{name}{suffix}", numel, offset, tensor if first_tensor else None)

    for name, numel, offset, tensor in _frozen(runtime):
        add("model", name, "", numel, offset, tensor if first_holder else None)
    for name, buffer in _persistent_buffers(model):
        add("buffer", name, "", buffer.numel(), 0, buffer.reshape(-1) if runtime.rank == 0 else None)
    for owned in optim.fragments if optim is not None else runtime.fragments():
        slot, offset = owned.fragment.slot, owned.fragment.offset
        value = owned.value.detach().reshape(-1)
        add("model", slot.name, "", slot.numel, offset, value if first_replica else None)
        if runtime.plan.wire.spread_difference:
            add("held", slot.name, "", slot.numel, offset, owned.held if first_replica else None)
        for key, entry in _state_of(optim, owned).items():
            if isinstance(entry, torch.Tensor) and entry.dim() > 0:
                as_long = entry.numel() == owned.value.numel()
                numel, begin = (slot.numel, offset) if as_long else (entry.numel(), 0)
                add("optimizer", slot.name, f"/{key}", numel, begin, entry.reshape(-1) if first_replica else None)
            else:
                number = entry.item() if isinstance(entry, torch.Tensor) else entry
                values[f"optimizer/{slot.name}/{key}"] = number
    values[_of_part("feedback", runtime)] = sizes = _feedback_sizes(runtime)
    for key, lost in runtime.reducer.reductions.lost.items():
        name = _of_part(f"feedback/{key}", runtime)
        vectors.add(name, sum(sizes[key]), sum(sizes[key][: runtime.rank]), lost)
    if optim is not None:
        values["optimizer"] = type(optim.inner).__name__
        values["groups"] = [
            {key: _as_json(value) for key, value in group.items() if key != "params" and _is_json(value)}
            for group in optim.param_groups
        ]


def load(parts: Sequence[Trained], path: Path) -> dict[str, Json]:
    """Read a checkpoint; see :func:`thinwire.load`.

    Args:
        parts: this rank's; equally many on every rank.
        path: the directory.
    """
    for model, _ in parts:
        runtime_of(model).holds.refuse("load()")
    shapes = _union({name: shape for model, _ in parts for name, shape in _shapes(model).items()})
    manifest = _everywhere(lambda: _open(shapes, parts, path))
    loading = [_Loading(model, optim, manifest, path) for model, optim in parts]
    vectors = _Vectors()
    try:
        # All ranks look before any reads: none may wait for one that has given up.
        _everywhere(lambda: _want_all(loading, vectors))
        store.read(path, vectors.sharded(), control=control())
    except CheckpointError:
        for part in loading:
            part.undo()
        raise
    for part in loading:
        part.finish()
    return dict(manifest.values["extra"])


class SavedModel:
    """The model of a checkpoint, for one process without a job: parameters and buffers, one at a time.

    Args:
        path: the checkpoint directory.

    Attributes:
        shapes: of parameters and persistent buffers, by name.

    Raises:
        CheckpointError: it is missing, incomplete or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self._reader = store.Reader(path)
        values = self._reader.manifest.values
        self.shapes: dict[str, list[int]] = values.get("shapes", {})
        _check_slices(self._reader.manifest, self.shapes, path)
        self._cuts: dict[str, list[int]] = values.get("slices", {})

    def read(self, name: str) -> torch.Tensor:
        """Give a parameter or a buffer, whole, however it was cut when it was saved.

        Args:
            name: one of :attr:`shapes`.

        Returns:
            fp32, or the dtype of a frozen parameter or a buffer; on CPU.

        Raises:
            CheckpointError: it cannot be read, or has another length than its shape.
        """
        key = f"buffer/{name}" if f"buffer/{name}" in self._reader.manifest.vectors else f"model/{name}"
        shape = list(self.shapes[name])
        dim, ways = self._cuts.get(name, (0, 1))
        if name not in self._cuts:
            return self._shaped(key, shape)
        part = [*shape[:dim], shape[dim] // ways, *shape[dim + 1 :]]
        return torch.cat([self._shaped(_sliced(key, index), part) for index in range(ways)], dim)

    def _shaped(self, key: str, shape: list[int]) -> torch.Tensor:
        found = self._reader.vector(key)
        if found.numel() != math.prod(shape):
            raise CheckpointError(f"corrupt: {key} has {found.numel()} elements, and the shape {shape}")
        return found.view(shape)


def _want_all(loading: Sequence[_Loading], vectors: _Vectors) -> None:
    for part in loading:
        part.want(vectors)


class _Loading:
    """A part that is being loaded: nothing of it is touched before all that it wants has been found."""

    def __init__(self, model: nn.Module, optim: ShardedOptimizer | None, manifest: store.Manifest, path: Path) -> None:
        self._model, self._optim, self._manifest, self._path = model, optim, manifest, path
        self._runtime = runtime = runtime_of(model)
        runtime.join_spreads()
        runtime.zero_grad()
        self._same_plan = manifest.values["plan"] == runtime.plan.to_toml()
        self._with_held = runtime.plan.wire.spread_difference and self._same_plan
        self._made = _make_state(optim) if optim is not None else []
        self._numbers: list[tuple[dict[str, Any], str, Json]] = []
        self._copies: list[Callable[[], object]] = []
        self._lost: dict[str, torch.Tensor] = {}

    def want(self, vectors: _Vectors) -> None:
        """Say what is to be read, and where to.

        Raises:
            CheckpointError: if the checkpoint lacks the optimizer's state.
        """
        stored = _StoredParameters(self._manifest, self._runtime, vectors)
        self._copies = _want_unoptimized(self._model, self._runtime, self._manifest, vectors, stored)
        for owned in self._optim.fragments if self._optim is not None else self._runtime.fragments():
            stored.want("model", owned, "", owned.value.detach().view(-1))
            if self._with_held:
                stored.want("held", owned, "", owned.held)
        self._lost = _want_feedback(self._runtime, self._manifest, vectors, same_plan=self._same_plan)
        if self._optim is not None:
            self._numbers = _want_state(self._optim, self._manifest, stored, self._path)
        self._copies += stored.copies

    def undo(self) -> None:
        """Leave the optimizer as it was."""
        for owned in self._made:
            assert self._optim is not None
            self._optim.state.pop(owned.value, None)

    def finish(self) -> None:
        """Everything has been read."""
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
        runtime.reducer.reductions.lost = self._lost
        # The update that is about to be spread belongs to it.
        runtime.loaded(int(self._manifest.values["num_steps"]), with_replicas=self._with_held)
        runtime.join_spreads()


def _everywhere(action: Callable[[], T]) -> T:
    """Run an action that does not communicate on every rank; an error on any rank is raised on all."""

    def first(problems: Mapping[int, str]) -> CheckpointError:
        return CheckpointError(next(iter(problems.values())))

    ranks = control()
    return ranks.agree(action, first)[ranks.rank]


def _union(mine: Mapping[str, Json]) -> dict[str, Json]:
    """What all ranks hold, each a part of it."""
    return {key: value for part in control().all_gather_object(dict(mine)) for key, value in part.items()}


def _of_part(key: str, runtime: Runtime) -> str:
    label = runtime.part.label
    return f"{key} of {label}" if label else key


def _open(shapes: Mapping[str, Json], parts: Sequence[Trained], path: Path) -> store.Manifest:
    """The verified manifest of a checkpoint that fits the model and the optimizer; nothing has been touched yet."""
    manifest = store.verify(path, checksums=False)
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
        return manifest
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
    return manifest


def _check_slices(manifest: store.Manifest, shapes: Mapping[str, Json], path: Path) -> None:
    """Whether the checkpoint says sensibly how it has cut the model's parameters.

    Raises:
        CheckpointError: naming the parameter.
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
    """Ask for frozen parameters and buffers, in the dtype in which they are stored.

    Returns:
        What copies values from where they will be read to where they belong.
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
    optim: ShardedOptimizer, manifest: store.Manifest, parameters: _StoredParameters, path: Path
) -> list[tuple[dict[str, Any], str, Json]]:
    """Ask for this rank's optimizer state.

    Returns:
        State that is one number, not a vector: where it belongs and its value.
    """
    stored = {*(key.partition("@")[0] for key in manifest.vectors), *manifest.values}
    stepped = {key.rpartition("/")[0] for key in stored if key.startswith("optimizer/")}
    numbers = []
    for owned in optim.fragments:
        slot = owned.fragment.slot
        name = f"optimizer/{slot.name}"
        if name not in stepped:
            optim.state.pop(owned.value, None)
            continue
        for key, entry in _state_of(optim, owned).items():
            full = f"{name}/{key}"
            if full not in stored:
                raise CheckpointError(
                    f"{path}: the checkpoint has optimizer state for {slot.name} but none called {key!r}; load it with "
                    "the optimizer options it was saved with"
                )
            if full in manifest.values:
                numbers.append((optim.state[owned.value], key, manifest.values[full]))
            elif entry.numel() == owned.value.numel():
                parameters.want("optimizer", owned, f"/{key}", entry.view(-1))
            else:
                parameters.want_fragment(full, slot.name, entry.numel(), 0, entry.view(-1))
    return numbers


class _StoredParameters:
    """Asks for fragments of parameters, however tensor parallelism had cut them when they were saved."""

    def __init__(self, manifest: store.Manifest, runtime: Runtime, vectors: _Vectors) -> None:
        self._manifest, self._runtime, self._vectors = manifest, runtime, vectors
        self._cuts: dict[str, list[int]] = manifest.values.get("slices", {})
        self.copies: list[Callable[[], object]] = []

    def dtype_of(self, key: str) -> torch.dtype | None:
        """The element type of a vector, or of its slices; None if there is no such vector."""
        entry = self._manifest.vectors.get(key) or self._manifest.vectors.get(_sliced(key, 0))
        return None if entry is None else entry.dtype

    def want(self, prefix: str, owned: OwnedFragment, suffix: str, target: torch.Tensor) -> None:
        """Ask for what belongs to a fragment: a part of a vector as long as its parameter."""
        slot = owned.fragment.slot
        self.want_fragment(f"{prefix}/{slot.name}{suffix}", slot.name, slot.numel, owned.fragment.offset, target)

    def want_fragment(self, key: str, name: str, numel: int, offset: int, target: torch.Tensor) -> None:
        """Ask for elements from ``offset`` on of this rank's slice of a vector.

        Args:
            key: of the vector, without its slice.
            name: of the parameter.
            numel: elements of this rank's slice.
            offset: of the first.
            target: 1-D, contiguous; filled once everything has been read and copied.
        """
        here, cut = self._runtime.slices.get(name), self._cuts.get(name)
        if cut is None and here is None:
            self._vectors.add(key, numel, offset, target)
        elif here is not None and cut == [here.dim, here.ways]:
            self._vectors.add(_sliced(key, here.index), numel, offset, target)
        elif target.numel():
            self._piece_together(key, self._manifest.values["shapes"][name], here, cut, offset, target)

    def _piece_together(
        self, key: str, shape: list[int], here: Slice | None, cut: list[int] | None, offset: int, target: torch.Tensor
    ) -> None:
        """Read the rows that a fragment touches from every slice that holds a part of them.

        A *row* is what is contiguous in the whole parameter and is cut: all from the dimension on that is cut.
        """
        dim = here.dim if here is not None else cut[0] if cut is not None else 0
        inner = math.prod(shape[dim + 1 :])
        row = shape[dim] * inner  # elements of a row of the whole
        begin, width = (0, row) if here is None else (here.index * row // here.ways, row // here.ways)
        ways = 1 if cut is None else cut[1]
        stored_width = row // ways
        if math.prod(shape[:dim]) == 1:  # one row: slices lie one behind the other
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
    """Dimension and number of slices of every parameter that is cut."""
    return {name: [cut.dim, cut.ways] for name, cut in runtime.slices.items() if cut is not None}


class _Vectors:
    """Collects chunks by key."""

    def __init__(self) -> None:
        self._numel: dict[str, int] = {}
        self._chunks: dict[str, list[Chunk]] = {}

    def add(self, key: str, numel: int, offset: int, tensor: torch.Tensor | None) -> None:
        """Add a chunk; ``None`` announces the vector without holding any of it."""
        self._numel[key] = numel
        chunks = self._chunks.setdefault(key, [])
        if tensor is not None:
            chunks.append(Chunk(offset, tensor))

    def sharded(self) -> dict[str, ShardedVector]:
        """The vectors."""
        return {key: ShardedVector(numel, tuple(self._chunks[key])) for key, numel in self._numel.items()}


def _feedback_sizes(runtime: Runtime) -> dict[str, list[int]]:
    """Elements that each rank keeps for each reduction's error feedback."""
    runtime.reducer.join()
    everyone = control(runtime.part.data.ranks).all_gather_object(
        {key: lost.numel() for key, lost in runtime.reducer.reductions.lost.items()}
    )
    return {key: [sizes[key] for sizes in everyone] for key in runtime.reducer.reductions.lost}


def _want_feedback(
    runtime: Runtime, manifest: store.Manifest, vectors: _Vectors, *, same_plan: bool
) -> dict[str, torch.Tensor]:
    """Room for this rank's error feedback, if the checkpoint has it and it was made by the same plan."""
    stored = manifest.values.get(_of_part("feedback", runtime), {})
    if not runtime.plan.wire.error_feedback or not stored:
        return {}
    if not same_plan:
        if runtime.rank == 0:
            log.warning("the checkpoint's error feedback belongs to another plan: it starts from nothing")
        return {}
    wanted = {}
    for key in stored:
        name = _of_part(f"feedback/{key}", runtime)
        sizes = _sizes_of_ranks(stored[key], manifest.vectors.get(name), runtime.plan.world, name)
        wanted[key] = torch.zeros(sizes[runtime.rank], device=runtime.arena.device)
        vectors.add(name, sum(sizes), sum(sizes[: runtime.rank]), wanted[key])
    return wanted


def _sizes_of_ranks(sizes: Json, vector: VectorEntry | None, ranks: int, name: str) -> list[int]:
    """How a vector is shared out, as the manifest says; nothing is allocated for numbers that do not add up."""
    well_formed = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    if not well_formed or vector is None or len(sizes) != ranks or sum(sizes) != vector.numel:
        raise CheckpointError(f"the manifest does not say how {name} is shared out among {ranks} ranks: it is damaged")
    return list(sizes)


def _shapes(model: nn.Module) -> dict[str, Json]:
    """What a checkpoint holds of a model: parameters and persistent buffers, with their shapes."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if not is_ignored(parameter)]
    named = [*parameters, *_persistent_buffers(model)]
    return {name: list(tensor.shape) for name, tensor in named}


def _frozen(runtime: Runtime) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Frozen parameters' parts of this rank's P shard: name, length of the parameter, offset in it, values."""
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


def _state_of(optim: ShardedOptimizer | None, owned: OwnedFragment) -> dict[str, Any]:
    if optim is None:
        return {}
    return {key: value for key, value in optim.state.get(owned.value, {}).items() if value is not None}


@torch.no_grad()
def _make_state(optim: ShardedOptimizer) -> list[OwnedFragment]:
    """Let the optimizer allocate the state it lacks, with a step on zero gradients at a learning rate of zero.

    Returns:
        The fragments that had no state.
    """
    made = [owned for owned in optim.fragments if not _state_of(optim, owned)]
    rates = [group.get("lr") for group in optim.param_groups]
    for owned in optim.fragments:
        owned.value.grad = None
    for owned in made:
        owned.value.grad = torch.zeros_like(owned.value)
    for group in optim.param_groups:
        if "lr" in group:
            group["lr"] = 0.0
    optim.inner.step()
    for group, rate in zip(optim.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    for owned in made:
        owned.value.grad = None
    return made


def _restore_groups(optim: ShardedOptimizer, saved: list[dict[str, Json]]) -> None:
    for group, values in zip(optim.param_groups, saved, strict=True):
        group.update({key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in values.items()})


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


def _as_json(value: Any) -> Json:
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value

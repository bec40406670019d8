"""What of a sharded model goes into a checkpoint, and back under any other plan.

Everything is stored per parameter, as flat vectors: ``model/NAME`` in fp32, ``optimizer/NAME/KEY`` for state as long
as the parameter. State that is one number per parameter (Adam's ``step``) is stored as a value. What error feedback
owes belongs to the plan that made it: ``feedback/REDUCTION`` holds every rank's, one after the other. Where differences
are spread, so does what ranks hold in place of the masters: ``held/NAME``, in compute dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from thinwire.collectives.group import control
from thinwire.errors import CheckpointError
from thinwire.program import Axis, Lane
from thinwire.shard import state as store
from thinwire.shard.optim import OwnedFragment, ShardedOptimizer, own_fragments
from thinwire.shard.runtime import Runtime, runtime_of
from thinwire.shard.state import Chunk, ShardedVector

__all__ = ["load", "save"]

log = logging.getLogger("thinwire")

Json = Any
T = TypeVar("T")


def save(model: nn.Module, optim: ShardedOptimizer | None, path: Path, extra: Mapping[str, Json] | None) -> None:
    """Write a checkpoint; see :func:`thinwire.save`."""
    runtime = runtime_of(model)
    runtime.join_spreads()
    vectors = _Vectors()
    first_replica = runtime.axes[Axis.REPLICA, Lane.SYNC].index == 0
    first_holder = first_replica and runtime.axes[Axis.SHARD, Lane.REDUCE].index == 0
    values: dict[str, Json] = {
        "plan": runtime.plan.to_toml(),
        "num_steps": runtime.num_steps,
        "shapes": _shapes(model),
        "extra": dict(extra or {}),
    }
    for key, numel, offset, tensor in _frozen(runtime):
        vectors.add(key, numel, offset, tensor if first_holder else None)
    for name, buffer in _persistent_buffers(model):
        vectors.add(f"buffer/{name}", buffer.numel(), 0, buffer.reshape(-1) if runtime.rank == 0 else None)
    fragments = optim.fragments if optim is not None else own_fragments(runtime)
    for owned in fragments:
        slot = owned.fragment.slot
        value = owned.value.detach().reshape(-1)
        vectors.add(f"model/{slot.name}", slot.numel, owned.fragment.offset, value if first_replica else None)
        if runtime.plan.wire.spread_difference:
            vectors.add(f"held/{slot.name}", slot.numel, owned.fragment.offset, owned.held if first_replica else None)
        for key, entry in _state_of(optim, owned).items():
            name = f"optimizer/{slot.name}/{key}"
            if isinstance(entry, torch.Tensor) and entry.numel() == owned.value.numel() and entry.dim() > 0:
                vectors.add(name, slot.numel, owned.fragment.offset, entry.reshape(-1) if first_replica else None)
            elif isinstance(entry, torch.Tensor) and entry.dim() > 0:
                vectors.add(name, entry.numel(), 0, entry.reshape(-1) if first_replica else None)
            else:
                values[name] = entry.item() if isinstance(entry, torch.Tensor) else entry
    values["feedback"] = sizes = _feedback_sizes(runtime)
    for key, lost in runtime.reducer.lost.items():
        vectors.add(f"feedback/{key}", sum(sizes[key]), sum(sizes[key][: runtime.rank]), lost)
    if optim is not None:
        values["optimizer"] = type(optim.inner).__name__
        values["groups"] = [
            {key: _as_json(value) for key, value in group.items() if key != "params" and _is_json(value)}
            for group in optim.param_groups
        ]
    store.write(path, vectors.sharded(), values, control=control())


def load(model: nn.Module, optim: ShardedOptimizer | None, path: Path) -> dict[str, Json]:
    """Read a checkpoint; see :func:`thinwire.load`."""
    runtime = runtime_of(model)
    runtime.refuse_if_whole("load()")
    manifest = _everywhere(lambda: _open(model, optim, path))
    runtime.join_spreads()
    runtime.zero_grad()
    vectors = _Vectors()
    casts = _want_unoptimized(model, runtime, manifest, vectors)
    same_plan = manifest.values["plan"] == runtime.plan.to_toml()
    with_held = runtime.plan.wire.spread_difference and same_plan
    for owned in optim.fragments if optim is not None else own_fragments(runtime):
        slot = owned.fragment.slot
        vectors.add(f"model/{slot.name}", slot.numel, owned.fragment.offset, owned.value.detach().view(-1))
        if with_held:
            vectors.add(f"held/{slot.name}", slot.numel, owned.fragment.offset, owned.held)
    numbers = []
    made = _make_state(optim) if optim is not None else []
    lost = _want_feedback(runtime, manifest, vectors, same_plan=same_plan)
    try:
        if optim is not None:
            numbers = _everywhere(lambda: _want_state(optim, manifest, vectors, path))
        store.read(path, vectors.sharded(), control=control())
    except CheckpointError:
        for owned in made:  # the optimizer is as it was
            assert optim is not None
            optim.state.pop(owned.value, None)
        raise
    for target, stored in casts:
        target.copy_(stored.view(target.shape))
    for state, key, value in numbers:
        if isinstance(state[key], torch.Tensor):
            state[key].fill_(value)
        else:
            state[key] = value
    if optim is not None:
        _restore_groups(optim, manifest.values["groups"])
    runtime.reducer.lost = lost
    runtime.num_steps = int(manifest.values["num_steps"]) - 1  # the update that is about to be spread belongs to it
    runtime.loaded(with_replicas=with_held)
    runtime.join_spreads()
    return dict(manifest.values["extra"])


def _everywhere(action: Callable[[], T]) -> T:
    """Do something on every rank without communication; an error on any rank is every rank's, so that none waits."""
    result: T | None = None
    problem = None
    try:
        result = action()
    except CheckpointError as error:
        problem = str(error)
    found = next((text for text in control().all_gather_object(problem) if text), None)
    if found is not None:
        raise CheckpointError(found)
    return cast(T, result)


def _open(model: nn.Module, optim: ShardedOptimizer | None, path: Path) -> store.Manifest:
    """The verified manifest of a checkpoint that fits the model and the optimizer; nothing has been touched yet."""
    manifest = store.verify(path, checksums=False)
    saved_shapes, shapes = manifest.values.get("shapes", {}), _shapes(model)
    differences = [
        f"{name} is {saved_shapes.get(name, 'missing')} in the checkpoint, {shapes.get(name, 'missing')} in the model"
        for name in {**shapes, **saved_shapes}
        if saved_shapes.get(name) != shapes.get(name)
    ]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(f"{path}: saved from another model: {'; '.join(differences[:3])}{more}")
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


def _want_unoptimized(
    model: nn.Module, runtime: Runtime, manifest: store.Manifest, vectors: _Vectors
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ask for frozen parameters and buffers, in the dtype in which they are stored.

    Returns:
        Pairs of where a value belongs and where it will be read, for the caller to copy.
    """
    casts = []
    wanted = list(_frozen(runtime))
    wanted += [(f"buffer/{name}", buffer.numel(), 0, buffer) for name, buffer in _persistent_buffers(model)]
    for key, numel, offset, target in wanted:
        entry = manifest.vectors.get(key)
        dtype = entry.dtype if entry is not None and entry.dtype is not None else target.dtype
        if dtype == target.dtype and target.dim() == 1 and target.is_contiguous():
            vectors.add(key, numel, offset, target)
        else:
            stored = torch.empty(target.numel(), dtype=dtype, device=target.device)
            vectors.add(key, numel, offset, stored)
            casts.append((target, stored))
    return casts


def _want_state(
    optim: ShardedOptimizer, manifest: store.Manifest, vectors: _Vectors, path: Path
) -> list[tuple[dict[str, Any], str, Json]]:
    """Ask for this rank's optimizer state.

    Returns:
        State that is one number, not a vector: where it belongs and its value.
    """
    stored = {*manifest.vectors, *manifest.values}
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
                vectors.add(full, slot.numel, owned.fragment.offset, entry.view(-1))
            else:
                vectors.add(full, entry.numel(), 0, entry.view(-1))
    return numbers


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
    everyone = control().all_gather_object({key: lost.numel() for key, lost in runtime.reducer.lost.items()})
    return {key: [sizes[key] for sizes in everyone] for key in runtime.reducer.lost}


def _want_feedback(
    runtime: Runtime, manifest: store.Manifest, vectors: _Vectors, *, same_plan: bool
) -> dict[str, torch.Tensor]:
    """Room for this rank's error feedback, if the checkpoint has it and it was made by the same plan."""
    stored: dict[str, list[int]] = manifest.values.get("feedback", {})
    if not runtime.plan.wire.error_feedback or not stored:
        return {}
    if not same_plan:
        if runtime.rank == 0:
            log.warning("the checkpoint's error feedback belongs to another plan: it starts from nothing")
        return {}
    wanted = {}
    for key, sizes in stored.items():
        wanted[key] = torch.zeros(sizes[runtime.rank], device=runtime.arena.device)
        vectors.add(f"feedback/{key}", sum(sizes), sum(sizes[: runtime.rank]), wanted[key])
    return wanted


def _shapes(model: nn.Module) -> dict[str, Json]:
    """What a checkpoint holds of a model: parameters and persistent buffers, with their shapes."""
    named = [*model.named_parameters(), *_persistent_buffers(model)]
    return {name: list(tensor.shape) for name, tensor in named}


def _frozen(runtime: Runtime) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    """Frozen parameters' parts of this rank's P shard: key, length of the parameter, offset in it, values."""
    shard = runtime.axes[Axis.PARAMS, Lane.REDUCE].index
    for unit in runtime.units:
        for buffer in unit.buffers:
            if not buffer.layout.trainable:
                for slot, offset, run in buffer.layout.pieces(shard):
                    part = buffer.shard[run.start : run.start + run.length]
                    yield f"model/{slot.name}", slot.numel, offset, part


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

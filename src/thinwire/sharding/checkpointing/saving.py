"""Saves a sharded model to a checkpoint, and loads it under any other plan.

Everything is stored per parameter, as flat vectors: ``model/NAME`` in fp32, and ``optimizer/NAME/KEY`` for state of the
parameter's length. State that is one number per parameter (Adam's ``step``) is stored as a value; so are the options of
parameter groups, in ``groups``, and the number of each parameter's group, in ``group_numbers``. Parameters that were
frozen when the model was sharded have their own dtype, and a place of their own
(:mod:`thinwire.sharding.checkpointing.frozen_parameters`). Two kinds of vectors are valid only under the plan that
wrote them. ``feedback/REDUCTION`` holds the rounding errors of error feedback, rank after rank; they contain the loss
scale, whose state is the value ``loss_scale``. ``held/NAME`` holds the P-shard values in compute dtype, if the plan
spreads differences. Frozen parameters that ranks keep encoded have other vectors
(:mod:`thinwire.sharding.checkpointing.encoded_parameters`). The value ``order`` names the units in the order in which
their gradients share messages, where ranks have agreed about one.
``average/NAME`` is the average of the weights, whose counts are the value ``average``.

Plans with islands add keys; see :mod:`thinwire.sharding.islands.saved`.

A parameter that tensor parallelism cuts is stored slice by slice, as ``model/NAME@INDEX``. The value ``slices`` holds
the dimension and the number of slices. When a rank loads a parameter, it assembles the slice that it needs. Keys of
values that belong to one part of a model, under tensor or pipeline parallelism, contain the label of the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from thinwire.agreement import NOTHING, Typed
from thinwire.checkpoint import store
from thinwire.checkpoint.background import BackgroundWriter, PendingSave
from thinwire.checkpoint.durable import directory_of
from thinwire.checkpoint.storage import ShardedVector
from thinwire.collectives.group import Control, before_shutdown, control, control_beside
from thinwire.collectives.links.streams import streams_of
from thinwire.errors import CheckpointError, UsageError
from thinwire.program.wire import spreads_difference
from thinwire.sharding.checkpointing.encoded_parameters import ENCODED, encoded_forms
from thinwire.sharding.checkpointing.frozen_parameters import base_for, forget_base, note_save
from thinwire.sharding.checkpointing.manifest_values import check_values
from thinwire.sharding.checkpointing.names import renamed, stored
from thinwire.sharding.checkpointing.share_states import FragmentStates
from thinwire.sharding.checkpointing.stored_parameters import (
    Json,
    ModelAndOptimizer,
    Vectors,
    add_frozen,
    add_piece,
    everywhere,
    group_numbers,
    of_part,
    persistent_buffers,
    shapes_of,
    union,
)
from thinwire.sharding.islands.saved import lost_of, own_key, own_masters, shared_pieces, turns_of
from thinwire.sharding.memory.local import LocalPart
from thinwire.sharding.runtime.averaging import APPLIED
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.units import is_number

_SIZES: Final[Typed[dict[str, int]]] = Typed(dict[str, int])
_FLAG: Final[Typed[bool]] = Typed(bool)

_writers: dict[tuple[int, ...], BackgroundWriter] = {}
"""Writes this process's checkpoints in the background, by the ranks that save together."""

_given_up: dict[tuple[int, ...], list[BackgroundWriter]] = {}
"""Writers whose last save took longer than its limit. Their groups may have timed out, so each needs a successor."""


def save(
    parts: Sequence[ModelAndOptimizer],
    path: str | Path,
    extra: Mapping[str, Json] | None,
    *,
    frozen: str | Path | None = None,
) -> None:
    """Write a checkpoint of everything that the ranks of the job train; see :func:`thinwire.save`. Every rank has the
    same number of parts."""
    ranks = savers(parts)
    path = agreed_path(ranks, path, frozen, extra)
    finish_save(ranks)
    vectors, values, shared = _collect(parts, path, extra)
    base = base_for(parts[0][0], frozen, path, shared, ranks)
    try:
        store.write(path, vectors, values, control=ranks, base=base)
    except BaseException:
        forget_base(parts[0][0])
        raise


def savers(parts: Sequence[ModelAndOptimizer]) -> Control:
    """The ranks that save and load parts of one model together."""
    return runtime_of(parts[0][0]).control


def agreed_path(
    ranks: Control,
    path: str | Path,
    frozen: str | Path | None = None,
    extra: object = None,
    limit: float | None = None,
) -> Path:
    """The directory of a checkpoint, once all ranks have found their arguments right: none waits for one that has not.
    Collective.

    Raises:
        UsageError: An argument of a rank is wrong. Raised on every rank.
    """

    def check() -> None:
        for place in (path, path if frozen is None else frozen):
            directory_of(place)
        if extra is not None and not isinstance(extra, Mapping):
            raise UsageError(f"extra = {extra!r}: give a table of JSON values, such as {{'epoch': 2}}")
        if limit is not None and not (is_number(limit) and 0 < limit <= 1e9):
            raise UsageError(f"limit = {limit!r}: give seconds, above 0 and at most 1e9, or None for no limit")

    ranks.agree(check, lambda problems: UsageError(next(iter(problems.values()))), NOTHING)
    return directory_of(path)


def start_saving(
    parts: Sequence[ModelAndOptimizer],
    path: str | Path,
    extra: Mapping[str, Json] | None,
    then: Callable[[], None] | None = None,
    *,
    limit: float | None = None,
    copies: bool = True,
    frozen: str | Path | None = None,
) -> PendingSave:
    """Begin to write a checkpoint in the background; see :func:`thinwire.async_save`. Every rank has the same number of
    parts. The writing thread of this rank does ``then`` once the checkpoint is complete. Nothing need be copied
    (``copies``) if the caller waits for the save.

    Raises:
        CheckpointError: The save before has failed, or one that was given up still hangs. Raised on every rank.
    """
    ranks = savers(parts)
    path = agreed_path(ranks, path, frozen, extra, limit)
    finish_save(ranks)
    if _given_up.get(ranks.ranks):
        _refuse_beside_hanging(path, ranks)
    vectors, values, shared = _collect(parts, path, extra)
    path = path.absolute()  # the program may go to another directory while this one writes
    base = base_for(parts[0][0], frozen, path, shared, ranks)
    if ranks.ranks not in _writers:
        before = len(_given_up.get(ranks.ranks, ()))
        beside = control_beside(f"checkpoint-{before}" if before else "checkpoint", ranks.ranks)
        if not _writers:
            before_shutdown(_close_writers)
        _writers[ranks.ranks] = BackgroundWriter(beside, streams_of, beside.close)
    pending = _writers[ranks.ranks].start(path, vectors, values, then=then, limit=limit, copies=copies, base=base)
    note_save(parts[0][0], pending)
    return pending


def _refuse_beside_hanging(path: Path, ranks: Control) -> None:
    """Refuse to begin a save while an earlier one hangs on any rank: memory for another copy would be lost, too."""
    mine = any(writer.hangs for writer in _given_up[ranks.ranks])
    hangs = [rank for rank, hanging in zip(ranks.ranks, ranks.all_gather_typed(mine, _FLAG), strict=True) if hanging]
    if hangs:
        where = ", ".join(map(str, hangs))
        raise CheckpointError(f"{path}: cannot save: an earlier save still waits for the file system on rank {where}")


def finish_save(ranks: Control | None = None) -> None:
    """Wait until no checkpoint of these ranks, by default all of the job, is being written in the background.
    Collective.

    Raises:
        CheckpointError: The last one failed, and nobody has asked for its result, or it takes longer than its limit.
            Raised on every rank.
    """
    if not _writers:
        return
    ranks = ranks or control()
    if (writer := _writers.get(ranks.ranks)) is None:
        return
    try:
        writer.finish(ranks)
    finally:
        if writer.given_up:
            _given_up.setdefault(ranks.ranks, []).append(_writers.pop(ranks.ranks))


def wait_for_writer() -> None:
    """Wait until no checkpoint is being written in the background, however it ends. Exchanges nothing."""
    for writer in _writers.values():
        writer.join()


def _close_writers() -> None:
    _given_up.clear()
    while _writers:
        _writers.popitem()[1].close()


def _collect(
    parts: Sequence[ModelAndOptimizer], path: Path, extra: Mapping[str, Json] | None
) -> tuple[dict[str, ShardedVector], dict[str, Json], dict[str, ShardedVector]]:
    """The vectors and the values of a checkpoint, and the vectors of frozen parameters."""
    runtimes = [runtime_of(model) for model, _ in parts]
    for runtime in runtimes:
        runtime.refuse_half_loaded()
        if APPLIED in runtime.blocks:  # in other blocks for reading, parameters are what they are saved as
            runtime.refuse("save()")
    vectors, shared = Vectors(), Vectors()
    plan, num_steps = runtimes[0].plan, runtimes[0].num_steps
    values: dict[str, Json] = {"plan": plan.to_toml(full=True), "num_steps": num_steps, "extra": dict(extra or {})}
    ranks = savers(parts)
    values["shapes"] = union(shapes_of(parts), ranks)
    sharded = [runtime.sharded for runtime in runtimes]
    slices = (item for part in sharded for item in part.slices.items())
    values["slices"] = union({name: [cut.dim, cut.ways] for name, cut in slices if cut is not None}, ranks)
    if updated := union({name: "float32" for part in sharded for name in frozen_masters(part)}, ranks):
        values["updated"] = updated
    if parts[0][1] is not None:
        values["group_numbers"] = union(group_numbers(parts), ranks)
    if any(part.codecs.stored is not None for part in sharded):
        values[ENCODED] = union(encoded_forms(buffer for part in sharded for buffer in part.buffers), ranks)
    for runtime, (_, optim) in zip(runtimes, parts, strict=True):
        runtime.join()
        _save_part(runtime, optim, vectors, values)
        add_frozen(runtime.sharded, shared)
    everywhere(lambda: check_values(values, f"{path}: cannot save"), ranks)
    frozen = {stored(key): vector for key, vector in shared.items()}
    own = {stored(key): vector for key, vector in vectors.items()}
    own |= {key: vector for key, vector in frozen.items() if not vector.numel}  # without a dtype if no rank has a piece
    return own, renamed(values, stored), {key: vector for key, vector in frozen.items() if vector.numel}


def frozen_masters(sharded: ShardedModel) -> list[str]:
    """Names of frozen parameters that have masters, such as a mean teacher's."""
    return [
        slot.name
        for buffer in sharded.buffers
        if buffer.layout.trainable
        for slot, compute in buffer.named
        if not compute.requires_grad
    ]


def _save_part(runtime: Runtime, optim: FragmentStates | None, vectors: Vectors, values: dict[str, Json]) -> None:
    """Add a part to a checkpoint, whose parameters are up to date, and whose gradients are combined."""
    sharded, reducer, schedule = runtime.sharded, runtime.reducer, runtime.schedule
    exchanges, means = runtime.exchanges, runtime.means
    plan, part, island = sharded.plan, sharded.part, sharded.part.data.island
    fragments, add, first = sharded.fragments, partial(add_piece, sharded, vectors), sharded.is_first_replica
    for name, buffer in persistent_buffers(sharded.model):
        dense = buffer.resolve_neg().contiguous().as_strided((buffer.numel(),), (1,))
        vectors.add(f"buffer/{name}", buffer.numel(), 0, dense if sharded.rank == island == part.tensor == 0 else None)
    if exchanges is not None:
        exchanges.wait()
        for slot, offset, anchor, momentum in shared_pieces(exchanges, fragments):
            add(f"model/{slot.name}", slot, offset, anchor, saves=island == 0)
            if momentum is not None:
                add(f"outer/momentum/{slot.name}", slot, offset, momentum, saves=island == 0)
    for owned in fragments:
        slot, name, offset = owned.fragment.slot, owned.name, owned.fragment.offset
        masters = "model" if exchanges is None else own_masters(island)
        add(f"{masters}/{name}", slot, offset, owned.value.detach().reshape(-1), saves=first)
        if spreads_difference(plan):
            add(f"{own_key('held', island)}/{name}", slot, offset, owned.held, saves=first)
        if means is not None:
            add(f"{own_key('average', island)}/{name}", slot, offset, means.of(owned), saves=first)
        for key, entry in (optim.state_of(owned) if optim is not None else {}).items():
            # A scalar parameter's moment may be NaN, like those of others, and a value of the manifest may not.
            if isinstance(entry, torch.Tensor) and (entry.dim() > 0 or not (owned.value.dim() or entry.isfinite())):
                as_long = entry.numel() == owned.value.numel()
                numel, begin = (slot.numel, offset) if as_long else (entry.numel(), 0)
                full = f"{own_key('optimizer', island)}/{name}/{key}"
                add(full, slot, begin, entry.reshape(-1), numel, saves=first)
            else:
                number = entry.item() if isinstance(entry, torch.Tensor) else entry
                values[own_key(f"optimizer/{name}/{key}", island)] = number
    if means is not None:
        values[own_key("average", island)] = list(means.counts)
    _save_lost(own_key("feedback", island), part, reducer.feedback.lost, vectors, values)
    if order := schedule.adopted_order():
        values[of_part(own_key("order", island), part)] = order
    if exchanges is not None:
        _save_lost("outer/lost", part, lost_of(exchanges), vectors, values, everywhere=True)
        values[of_part("outer", part)] = turns_of(exchanges)
        values["islands"] = plan.job_islands
    if optim is not None:
        if optim.loss_scale is not None:
            values[own_key("loss_scale", island)] = optim.loss_scale.state()
        values["optimizer"] = optim.kind
        values["groups"] = [
            {key: _as_json(value) for key, value in group.items() if key != "params" and _is_json(value)}
            for group in optim.param_groups
        ]


def _save_lost(
    key: str,
    part: LocalPart,
    lost: Mapping[str, torch.Tensor],
    vectors: Vectors,
    values: dict[str, Json],
    *,
    everywhere: bool = False,
) -> None:
    """Add rounding errors to a checkpoint, those of one rank after those of another: of the ranks that step together,
    or ``everywhere``, of all islands. Collective."""
    data = part.data
    ranks = control(data.everyone if everywhere else data.ranks)
    everyone = ranks.all_gather_typed({name: errors.numel() for name, errors in lost.items()}, _SIZES)
    values[of_part(key, part)] = sizes = {name: [of_rank[name] for of_rank in everyone] for name in lost}
    for name, of_rank in lost.items():
        vectors.add(of_part(f"{key}/{name}", part), sum(sizes[name]), sum(sizes[name][: ranks.rank]), of_rank)


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool) or _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    """Whether this is a tensor of one number, as a learning rate that a captured or compiled step reads."""
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _as_json(value: Any) -> Json:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    value = value.item() if _is_scalar(value) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

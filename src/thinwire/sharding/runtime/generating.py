"""Decides how a model with sharded parameters lies while it generates, and lays it so."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from thinwire.agreement import Typed
from thinwire.collectives.group import Control
from thinwire.collectives.memory import release_memory
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import UsageError
from thinwire.program import Axis, BufferInfo, Even, Kind, Lane, Scope, hops
from thinwire.program.wire import gather_sizes, used_codec
from thinwire.sharding.params.param_group import State, Unit
from thinwire.sharding.runtime.averaging import APPLIED
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.sharding.step.passes import Pass, Passes
from thinwire.sharding.step.pinned_units import recomputing
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.spec import CodecSpec, Factor, Plan
from thinwire.units import format_bytes

log = logging.getLogger("thinwire")

_ANSWER: Final[Typed[tuple[str, int, str | None]]] = Typed(tuple[str, int, str | None])
_NAME: Final = "generating()"


class Kept(enum.StrEnum):
    """What every rank keeps of the parameters while a model generates, beside its shards."""

    WHOLE = "whole"
    ENCODED = "encoded"
    SECONDARY = "secondary"
    NOTHING = "nothing"

    @property
    def exchanges(self) -> bool:
        """Whether a forward exchanges something with other ranks."""
        return self in (Kept.SECONDARY, Kept.NOTHING)


@dataclass(frozen=True, slots=True)
class Generation:
    """How a model with sharded parameters lies while it generates; ``str`` says it in one line.

    Attributes:
        kept: What every rank keeps: whole parameters, the encoded messages of all of them, a shard of them inside its
            node, or nothing.
        nbytes: Bytes that a rank keeps.
        inside: Bytes that a rank sends inside its node for each forward, which is each token.
        across: Bytes that it sends across nodes for each forward.
        room: Bytes that there was room for, on the rank with the least.
    """

    kept: Kept
    nbytes: int = 0
    inside: int = 0
    across: int = 0
    room: int = 0

    def __str__(self) -> str:
        sent = f"each token sends {format_bytes(self.across)} across nodes and {format_bytes(self.inside)} inside them"
        if not self.inside and not self.across:
            sent = "no token sends anything"
        kept = {
            Kept.WHOLE: "whole parameters",
            Kept.ENCODED: "all messages of a gather",
            Kept.SECONDARY: "a shard inside its node",
            Kept.NOTHING: "nothing",
        }
        size = f"{format_bytes(self.nbytes)}, with room for {format_bytes(self.room)}"
        return f"every rank keeps {kept[self.kept]} ({size}); {sent}"


def generates(model: nn.Module) -> bool:
    """Whether a sharded model is inside :func:`generating`."""
    return _NAME in runtime_of(model).blocks


@contextlib.contextmanager
def generating(model: nn.Module, *, keep: str | None = None) -> Iterator[Generation]:
    """Spare the forwards in this block as many gathers as memory allows. Collective.

    A model with sharded parameters gathers each unit for every token. In this block, every rank keeps whole parameters;
    or, where the plan's ``wire.gather`` or ``frozen.storage`` encodes, their messages, which each forward decodes; or a
    shard of them inside its node, so that no token crosses nodes; or nothing more than before. Of those that every rank
    has memory for, the ranks choose the one that sends the fewest bytes. Tokens are the same, bit for bit. The first
    two need no exchange, so ranks may run different numbers of forwards. Otherwise transformers' ``generate`` goes on
    until every rank has ended, if all ranks of the job train the model; so must other loops.

    What is kept takes at most half of the memory that is free; the other half is for caches and activations.

    Run the forwards without gradients. After the block, memory is what it was, and training goes on as without it.

    Args:
        model: A sharded model.
        keep: What to keep, however much is free: ``whole``, ``encoded`` (the messages), ``secondary`` (the shard) or
            ``nothing``; the same on every rank.

    Yields:
        What was chosen.

    Raises:
        UsageError: The model is inside a forward or a backward, or another block keeps its parameters; or the plan has
            no such way to keep them.
    """
    runtime = runtime_of(model)
    passes, ranks = runtime.passes, runtime.data_ranks
    if not recomputing():
        passes.forget_failed()
    if recomputing() or passes.state.present is not Pass.IDLE:
        raise UsageError(f"{_NAME} inside a forward or a backward of the model: enter it before the first of them")
    runtime.refuse(_NAME, beside=APPLIED)
    units = [unit for unit in runtime.units if unit.sharded]
    chosen = _choose(runtime.sharded, ranks, units, keep)
    if ranks.rank == 0 and units:
        log.info("%s: %s", _NAME, chosen)
    present = {unit.index for unit in units if unit.state is not State.SHARDED}
    with runtime.reading(_NAME), _laid(runtime, units, chosen.kept, present):
        yield chosen


# -- the choice --------------------------------------------------------------------------------------------------


def _choose(sharded: ShardedModel, ranks: Control, units: Sequence[Unit], keep: str | None) -> Generation:
    """The cheapest way to lie that every rank has memory for. Collective."""
    if not units:
        if keep not in (None, *Kept):
            raise UsageError(f"generating(keep={keep!r}): valid are {', '.join(Kept)}")
        return Generation(Kept.WHOLE)
    place, free = _free_memory(sharded.device)
    answers = ranks.all_gather_typed((place, free, keep), _ANSWER)
    neighbours = Counter(place for place, _, _ in answers)
    room = min(free // neighbours[place] for place, free, _ in answers) // 2
    ways = list(_ways(sharded.plan, units, room))
    if (wanted := {keep for _, _, keep in answers}) == {None}:
        return min((way for way in ways if way.nbytes <= room), key=lambda way: (way.across, way.inside))
    for way in ways:
        if wanted == {way.kept}:
            return way
    raise UsageError(
        f"generating(keep=...): the ranks say {', '.join(sorted(map(repr, wanted)))}, and this plan can keep "
        f"{', '.join(way.kept for way in ways)}; give one of these on every rank, or leave it out"
    )


def _ways(plan: Plan, units: Sequence[Unit], room: int) -> Iterator[Generation]:
    """The ways to lie."""
    buffers = [buffer for unit in units for buffer in unit.info.buffers]
    total = sum(buffer.nbytes for buffer in buffers)
    yield Generation(Kept.WHOLE, total, 0, 0, room)
    codec = used_codec(plan, "gather")
    encodes = not codec.is_none and not codec.is_variable_length  # those of variable length have room for the longest
    if encodes or (codec.is_none and any(buffer.stored is not None for buffer in buffers)):
        yield Generation(Kept.ENCODED, sum(_encoded_bytes(plan, buffer) for buffer in buffers), 0, 0, room)
    if (second := _second_factor(plan)) is not None:
        kept = sum(buffer.kept(second.ranks, plan.params.ranks) for buffer in buffers)
        none = plan.secondary is not None
        yield Generation(Kept.SECONDARY, 0 if none else kept, *_sent(second, buffers, plan, CodecSpec()), room)
    yield Generation(Kept.NOTHING, 0, *_sent(plan.params, buffers, plan, codec), room)


def _encoded_bytes(plan: Plan, buffer: BufferInfo) -> int:
    """Bytes of the messages of a buffer's gather."""
    pieces = plan.params.ranks
    return pieces * gather_sizes(used_codec(plan, "gather"), buffer, shards=pieces).gather(buffer.numel // pieces)


def _second_factor(plan: Plan) -> Factor | None:
    """The ranks that hold one copy of the parameters among them, if a gather from fewer ranks is cheaper."""
    if plan.secondary is not None:
        return plan.secondary
    return Factor(local=plan.params.local) if plan.params.nodes > 1 < plan.params.local else None


def _sent(factor: Factor, buffers: Sequence[BufferInfo], plan: Plan, codec: CodecSpec) -> tuple[int, int]:
    """Bytes that a rank sends, inside and across, to gather all buffers with a codec, or as ranks keep them."""
    sent = dict.fromkeys(Scope, 0)
    for buffer in buffers:
        pieces = Even(buffer.numel // factor.ranks, factor.ranks)
        sizes = gather_sizes(codec, buffer, shards=plan.params.ranks)
        for hop in hops(Kind.ALL_GATHER, factor.local, factor.nodes, pieces, 0, sizes):
            sent[hop.scope] += hop.sent
    return sent[Scope.INSIDE], sent[Scope.ACROSS]


def _free_memory(device: torch.device) -> tuple[str, int]:
    """Whose memory a rank with this device allocates, and how much of it is free.

    Returns:
        A name that ranks of the same memory have in common, and the bytes that are free for all of them together.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return str(torch.cuda.get_device_properties(device).uuid), free + unused
    import psutil  # which a training without generation does not need

    return _machine(), psutil.virtual_memory().available


@functools.cache
def _machine() -> str:
    """This machine since it was started; hosts of an emulated cluster are one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return f"{uuid.getnode():x}"


# -- laying the model --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _laid(runtime: Runtime, units: Sequence[Unit], kept: Kept, present: set[int]) -> Iterator[None]:
    """Keep what was chosen in this block. Afterwards, the units in ``present`` are gathered, and no others."""
    holds, model = runtime.holds, runtime.model
    with contextlib.ExitStack() as stack:
        stack.callback(holds.free_all, keep=present)
        if kept is Kept.WHOLE:
            stack.enter_context(holds.keeping())
            for unit in units:
                unit.start_gather(from_secondary=False)
            for unit in units:
                unit.need(from_secondary=False)
        elif kept is Kept.ENCODED:
            stack.enter_context(_encoded(units))
        elif kept is Kept.SECONDARY:
            stack.enter_context(_secondary(runtime.sharded, runtime.passes, units))
        data_ranks = runtime.data_ranks
        if units and kept.exchanges and hasattr(model, "generate") and data_ranks.size == dist.get_world_size():
            stack.enter_context(_in_step(model))
        yield


@contextlib.contextmanager
def _encoded(units: Sequence[Unit]) -> Iterator[None]:
    """Decode in this block what one gather has received."""
    units = [unit for unit in units if unit.state is State.SHARDED]  # others are whole already
    try:
        for unit in units:
            unit.gathers.keeps_messages = True
            unit.need(from_secondary=False)
            unit.free()
        yield
    finally:
        for unit in units:
            unit.gathers.forget_messages()
        release_memory()


@contextlib.contextmanager
def _secondary(sharded: ShardedModel, passes: Passes, units: Sequence[Unit]) -> Iterator[None]:
    """Gather from secondary shards in this block, which a plan without them gets for as long."""
    plan = sharded.plan
    lent: AxisGroup | None = None
    if plan.secondary is None:
        units = [unit for unit in units if unit.state is State.SHARDED]  # others are whole already
        with_one, device, data = plan.with_(secondary=_second_factor(plan)), sharded.device, sharded.part.data
        lent = AxisGroup.of(with_one, Axis.SECONDARY, Lane.GATHER, sharded.position, device, sharded.meter, data=data)
    were_valid = [unit.secondary_valid for unit in units]
    try:
        for unit in units:
            if lent is not None:
                unit.lend_secondary(lent)
            if not unit.secondary_valid:
                unit.need(from_secondary=False)
                unit.keep_secondary()
                unit.free()
        passes.evaluates_from_secondary = True
        yield
    finally:
        passes.evaluates_from_secondary = False
        for unit, was_valid in zip(units, were_valid, strict=True):
            unit.secondary_valid &= was_valid
            if lent is not None:
                unit.free()
                unit.lend_secondary(None)


@contextlib.contextmanager
def _in_step(model: Any) -> Iterator[None]:
    """Let transformers' ``generate`` run forwards until all ranks have ended their sequences, since each forward
    gathers."""
    before = model.__dict__.get("generate")
    model.generate = functools.partial(_synced, model.generate)
    try:
        yield
    finally:
        del model.generate
        if before is not None:
            model.generate = before


def _synced(generate: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` with ``synced_gpus``, also where the caller passes ``False``, as Seq2SeqTrainer does."""
    return generate(*args, **{**kwargs, "synced_gpus": True})

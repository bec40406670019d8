"""The whole measurement: within a budget, resumable, and with the most useful figures first."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.group import Control
from thinwire.collectives.job.threads import threads_of_updates
from thinwire.collectives.links.nccl import backend_maker
from thinwire.errors import UsageError
from thinwire.profile.coding import NUMELS, measure_codec
from thinwire.profile.computing import ModelPiece, measure_host_copies, measure_model, measure_touch, measure_update
from thinwire.profile.crowding import measure_crowding
from thinwire.profile.exchanging import SIZES, Exchange, Groups, exchanges, measure_exchange, sent_bytes
from thinwire.profile.handling import Weightless, measure_handling
from thinwire.profile.library import measure_library
from thinwire.profile.meeting import Meeting, measure_meetings
from thinwire.profile.timing import FEWEST, Deadline, timed
from thinwire.program import Scope
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.spec.codec import profiled_codecs
from thinwire.spec.profile import CodecRow, CollectiveRow, ComputeRow, Handling, OverlapRow, Profile
from thinwire.units import format_bytes

_EARLIER: Final[Typed[Profile | None]] = Typed(Profile | None)

MEETING_SIZES = (1 << 16, 1 << 20, 1 << 14, 1 << 22)
"""Bytes of the vectors to gather during computation; several sizes separate the delay from what grows with size."""

LONGEST_TURN, SHORTEST_TURN = 0.2, 0.02
"""Bounds in seconds of one turn of computation, alone or during transfers."""

TURNS = 30
"""Number of turns that should fit into their share of the budget."""

NEEDED_SIZES = (1 << 20, 1 << 16, 1 << 12)
"""Bytes of the vectors with which every collective that programs contain is measured, whatever the budget."""


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        mesh: All ranks.
        device: Device of this rank.
        budget: Approximate duration in seconds.
        pieces: Parts of models to time.
        memory: Bytes that one rank may use.
        codecs: Names of codecs, most useful first.
        library: Whether to time what other frameworks do, too: library calls, and computation without the runtime.
        weightless: Builds a model of no weight under a plan, which shows what the runtime takes.
    """

    mesh: Factor
    device: torch.device
    budget: float
    pieces: Sequence[ModelPiece]
    memory: int
    codecs: Sequence[str] = field(default_factory=profiled_codecs)
    library: bool = False
    weightless: Callable[[Plan, torch.device], Weightless] | None = None


@dataclass
class _Rows:
    """Rows measured so far, the delay of computation per second of other processor work, and what the runtime takes."""

    collectives: list[CollectiveRow] = field(default_factory=list)
    codecs: list[CodecRow] = field(default_factory=list)
    compute: list[ComputeRow] = field(default_factory=list)
    overlap: list[OverlapRow] = field(default_factory=list)
    library: list[CollectiveRow] = field(default_factory=list)
    crowding: float = 0.0
    handling: Handling = field(default_factory=Handling)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Let collections of garbage in this block leave out what is there already, as in training: one that does not takes
    longer than much of what is measured."""
    were_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not were_frozen:
            gc.unfreeze()


@_few_collections()
def measure(
    settings: Settings, control: Control, out: Path, report: Callable[[str], None], *, resume: bool = False
) -> Profile:
    """Measure and write the profile; every rank calls it, rank 0 writes.

    Args:
        settings: Settings of the measurement.
        control: Connects all ranks.
        out: File to write. It is rewritten after each step, so that an interruption loses little.
        report: Receives one line about each measurement.
        resume: Whether to keep the rows that ``out`` already has.

    Returns:
        The profile, the same on every rank.
    """
    rows = _earlier(settings, control, out) if resume else _Rows()
    deadline = Deadline(control, settings.budget)
    base = max(control.all_gather_typed(memory_in_use(settings.device), Typed(int)))
    update = measure_update(control, settings.device)
    touch = measure_touch(control, settings.device)
    up, down = measure_host_copies(control, settings.device)
    host_update = update
    if settings.device.type != "cpu":
        with threads_of_updates(settings.mesh.local):
            host_update = measure_update(control, torch.device("cpu"))
    step = timed(control, control.barrier, seconds=0.2, device=settings.device).median

    def profile() -> Profile:
        made = Profile(
            device=_device_name(settings.device),
            backend="gloo" if backend_maker(settings.device) is None else "nccl",
            torch=torch.__version__,
            nodes=settings.mesh.nodes,
            gpus_per_node=settings.mesh.local,
            memory=settings.memory,
            base_memory=base,
            update_seconds=update,
            touch_seconds=touch,
            up_seconds=up,
            down_seconds=down,
            host_update_seconds=host_update,
            step_seconds=step,
            handling=rows.handling,
            crowding=rows.crowding,
            collectives=tuple(rows.collectives),
            codecs=tuple(rows.codecs),
            compute=tuple(rows.compute),
            overlap=tuple(rows.overlap),
            library=tuple(rows.library),
        )
        if control.rank == 0:
            partial = out.with_suffix(out.suffix + ".partial")
            made.write(partial)
            Path(partial).replace(out)
        return made

    groups = Groups(settings.mesh, control.rank, settings.device)
    _measure_compute(settings, control, deadline.share(0.15), rows, report)
    profile()
    _measure_meetings(settings, control, groups, deadline.share(0.4), rows, report)
    profile()
    if settings.library and not rows.library:
        share = deadline.share(0.3)
        rows.library += measure_library(settings.mesh, control, settings.device, share, report)
    _measure_collectives(settings, control, groups, deadline.share(0.6), rows, report, profile)
    _measure_handling(settings, control, rows, report)
    _measure_codecs(settings, control, deadline, rows, report)
    return profile()


def _measure_compute(
    settings: Settings, control: Control, deadline: Deadline, rows: _Rows, report: Callable[[str], None]
) -> None:
    models: dict[ModelSpec, list[ModelPiece]] = {}
    for piece in settings.pieces:
        models.setdefault(piece.shape, []).append(piece)
    left = [pieces for pieces in models.values() if not any(_is_row_of(row, pieces[0]) for row in rows.compute)]
    for number, pieces in enumerate(left):
        report(f"computing: the parts of {pieces[0].shape.name or 'the model'}")
        share = max(0.0, deadline.left()) / (len(left) - number)
        rows.compute += measure_model(pieces, control, settings.device, share, plain=settings.library)


def _is_row_of(row: ComputeRow, piece: ModelPiece) -> bool:
    shape = piece.shape
    return (row.part, row.hidden, row.ffn, row.heads, row.vocab, row.seq, row.micro_batch, row.dtype) == (
        piece.part, shape.hidden, shape.ffn, shape.heads, shape.vocab, piece.seq, piece.micro_batch, piece.dtype,
    )  # fmt: skip


def _measure_handling(settings: Settings, control: Control, rows: _Rows, report: Callable[[str], None]) -> None:
    if settings.weightless is None or rows.handling != Handling():
        return
    report("what the runtime takes of the processor")
    rows.handling = measure_handling(
        settings.weightless, settings.mesh, rows.collectives, rows.crowding, control, settings.device
    )


def _measure_codecs(
    settings: Settings, control: Control, deadline: Deadline, rows: _Rows, report: Callable[[str], None]
) -> None:
    known = {(row.codec, row.dtype, row.numel) for row in rows.codecs}
    wanted = [
        (name, dtype, numel)
        for name in settings.codecs
        for dtype in ("bfloat16", "float32")
        for numel in NUMELS
        if (name, dtype, numel) not in known
    ]
    for number, (name, dtype, numel) in enumerate(wanted):
        if deadline.passed() and number:
            report(f"no time left for codecs {', '.join(dict.fromkeys(n for n, _, _ in wanted[number:]))}")
            return
        report(f"codec {name} of {numel:,} values in {dtype}")
        share = max(0.0, deadline.left()) / (len(wanted) - number)
        rows.codecs += measure_codec(name, dtype, numel, control, settings.device, share)


def _measure_meetings(
    settings: Settings,
    control: Control,
    groups: Groups,
    deadline: Deadline,
    rows: _Rows,
    report: Callable[[str], None],
) -> None:
    block = next((piece for piece in settings.pieces if piece.part == "block"), None)
    if block is None:
        return
    shapes = {Scope.INSIDE: (settings.mesh.local, 1), Scope.ACROSS: (1, settings.mesh.nodes)}
    # The delay of computation depends on the length of its operations, and so on the width of the model.
    known = {(row.scope, row.hidden) for row in rows.overlap}
    meetings = [
        Meeting(
            scope,
            sent_bytes(Exchange("all_gather", *shape), size),
            all_gather(groups.of(*shape), torch.zeros(size, dtype=torch.uint8, device=settings.device)).perform,
        )
        for size in MEETING_SIZES
        for scope, shape in shapes.items()
        if math.prod(shape) > 1 and (str(scope), block.shape.hidden) not in known
    ]
    if not meetings:
        return
    report(f"computing blocks of {block.shape.name or 'the model'} beside transfers")
    _, call = block.make(settings.device)

    def compute() -> None:
        call().sum().backward()

    turn = min(LONGEST_TURN, max(SHORTEST_TURN, deadline.left() / TURNS))
    if not rows.overlap:
        rows.crowding = measure_crowding(compute, control, settings.device, turn)
    rows.overlap += measure_meetings(meetings, compute, block.shape.hidden, control, settings.device, deadline, turn)


def _measure_collectives(
    settings: Settings,
    control: Control,
    groups: Groups,
    deadline: Deadline,
    rows: _Rows,
    report: Callable[[str], None],
    save: Callable[[], object],
) -> None:
    """Measure collectives, the most useful ones first.

    First come those that every plan needs, at a large, a small and a tiny size, whatever the budget: a single size
    determines neither latency nor bandwidth. Then everything is measured at one size before the next size starts, so
    that the budget cuts off the least useful sizes.
    """
    everything = list(exchanges(settings.mesh))
    needed = [(what, size) for size in NEEDED_SIZES for what in everything if what.needed]
    known = {(_exchange_of(row), row.sent) for row in rows.collectives}
    per_byte: dict[Exchange, float] = {}  # the fastest so far, which predicts the time of larger sizes
    for wanted in (needed, *([(what, size) for what in everything] for size in SIZES)):
        for number, (what, size) in enumerate(wanted):
            left, sent = deadline.left(), sent_bytes(what, size)
            too_slow = FEWEST * sent * per_byte.get(what, 0.0) > max(left, settings.budget / 4)
            if (
                16 * size > settings.memory
                or (what, sent) in known
                or ((left <= 0 or too_slow) and wanted is not needed)
            ):
                continue
            report(f"{what.kind} over {what.local} x {what.nodes}{_alone(what)}, {format_bytes(size)}")
            share = min(1.0, max(0.0, left) / (len(wanted) - number) / 2)
            row = measure_exchange(what, size, groups, control, settings.device, share)
            rows.collectives.append(row)
            known.add((what, sent))
            per_byte[what] = min(row.seconds / row.sent, per_byte.get(what, float("inf")))
        save()


def _exchange_of(row: CollectiveRow) -> Exchange:
    return Exchange(row.kind, row.local, row.nodes, row.groups)


def _alone(what: Exchange) -> str:
    return ", one group alone" if what.groups == "one" else ""


# -- about this rank ---------------------------------------------------------------------------------------------


def _earlier(settings: Settings, control: Control, out: Path) -> _Rows:
    """The rows of an interrupted measurement, which rank 0 reads for all."""

    def read() -> Profile | None:
        return Profile.read(out) if control.rank == 0 and out.exists() else None

    earlier = control.agree(read, lambda problems: UsageError(problems[0]), _EARLIER, raises_own=True)[0]
    if earlier is None:
        return _Rows()
    present = (settings.mesh.nodes, settings.mesh.local, _device_name(settings.device))
    if (earlier.nodes, earlier.gpus_per_node, earlier.device) != present:
        raise UsageError(
            f"{out} was measured on {earlier.nodes} nodes with {earlier.gpus_per_node} ranks each on {earlier.device}, "
            f"but this run has {present[0]} nodes with {present[1]} ranks each on {present[2]}; choose another --out, "
            "or omit --resume"
        )
    return _Rows(
        list(earlier.collectives),
        list(earlier.codecs),
        list(earlier.compute),
        list(earlier.overlap),
        list(earlier.library),
        earlier.crowding,
        earlier.handling,
    )


def memory_in_use(device: torch.device) -> int:
    """Bytes currently in use: by the process on CPU, on the device for CUDA."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return process_memory()[1]


def process_memory() -> tuple[int, int]:
    """Bytes of this process's address space, and resident bytes; 0 on systems other than Linux."""
    try:
        size, resident, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    except OSError:
        return 0, 0
    return size * os.sysconf("SC_PAGE_SIZE"), resident * os.sysconf("SC_PAGE_SIZE")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.backends.cpu.get_cpu_capability()})"

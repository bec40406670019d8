"""The whole measurement: within a budget, resumable, and with the most useful figures first."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
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
from thinwire.profile.exchanging import SIZES, Exchange, Groups, exchanges, measure_exchange, sent_bytes
from thinwire.profile.handling import Weightless, measure_handling
from thinwire.profile.library import measure_library
from thinwire.profile.meeting import Meeting, measure_crowding, measure_meetings
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
    """What of a profile takes long to measure, by the names that it has there."""

    collectives: tuple[CollectiveRow, ...] = ()
    codecs: tuple[CodecRow, ...] = ()
    compute: tuple[ComputeRow, ...] = ()
    overlap: tuple[OverlapRow, ...] = ()
    library: tuple[CollectiveRow, ...] = ()
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
            **vars(rows),
        )
        if control.rank == 0:
            partial = out.with_suffix(out.suffix + ".partial")
            made.write(partial)
            Path(partial).replace(out)
        return made

    measuring = _Measuring(settings, control, rows, report)
    measuring.compute(deadline.share(0.15))
    profile()
    measuring.meetings(deadline.share(0.4))
    profile()
    if settings.library and not rows.library:
        rows.library = tuple(measure_library(settings.mesh, control, settings.device, deadline.share(0.3), report))
    measuring.collectives(deadline.share(0.6), profile)
    measuring.handling()
    measuring.codecs(deadline)
    return profile()


class _Measuring:
    """Measures rows that are not there yet; arguments as of :func:`measure`."""

    def __init__(self, settings: Settings, control: Control, rows: _Rows, report: Callable[[str], None]) -> None:
        self._settings, self._control, self._rows, self._report = settings, control, rows, report
        self._device = settings.device
        self._groups = Groups(settings.mesh, control.rank, settings.device)

    def compute(self, deadline: Deadline) -> None:
        models: dict[ModelSpec, list[ModelPiece]] = {}
        for piece in self._settings.pieces:
            models.setdefault(piece.shape, []).append(piece)
        rows = [row.to_dict() for row in self._rows.compute]
        left = [pieces for pieces in models.values() if not any(pieces[0].row.items() <= row.items() for row in rows)]
        for number, pieces in enumerate(left):
            self._report(f"computing: the parts of {pieces[0].shape.name or 'the model'}")
            share = max(0.0, deadline.left()) / (len(left) - number)
            plain = self._settings.library
            self._rows.compute += tuple(measure_model(pieces, self._control, self._device, share, plain=plain))

    def meetings(self, deadline: Deadline) -> None:
        rows, mesh = self._rows, self._settings.mesh
        block = next((piece for piece in self._settings.pieces if piece.part == "block"), None)
        if block is None:
            return
        hidden = block.shape.hidden
        shapes = {Scope.INSIDE: (mesh.local, 1), Scope.ACROSS: (1, mesh.nodes)}
        # The delay of computation depends on the length of its operations, and so on the width of the model.
        known = {(row.scope, row.hidden) for row in rows.overlap}
        meetings = [
            Meeting(
                scope,
                sent_bytes(Exchange("all_gather", *shape), size),
                all_gather(self._groups.of(*shape), torch.zeros(size, dtype=torch.uint8, device=self._device)).perform,
            )
            for size in MEETING_SIZES
            for scope, shape in shapes.items()
            if math.prod(shape) > 1 and (str(scope), hidden) not in known
        ]
        if not meetings:
            return
        self._report(f"computing blocks of {block.shape.name or 'the model'} beside transfers")
        _, call = block.make(self._device)

        def compute() -> None:
            call().sum().backward()

        turn = min(LONGEST_TURN, max(SHORTEST_TURN, deadline.left() / TURNS))
        if not rows.overlap:
            rows.crowding = measure_crowding(compute, self._control, self._device, turn)
        rows.overlap += tuple(measure_meetings(meetings, compute, hidden, self._control, self._device, deadline, turn))

    def collectives(self, deadline: Deadline, save: Callable[[], object]) -> None:
        """Measure collectives, the most useful ones first.

        First come those that every plan needs, at a large, a small and a tiny size, whatever the budget: a single size
        determines neither latency nor bandwidth. Then everything is measured at one size before the next size starts,
        so that the budget cuts off the least useful sizes.
        """
        settings, rows = self._settings, self._rows
        everything = list(exchanges(settings.mesh))
        needed = [(what, size) for size in NEEDED_SIZES for what in everything if what.needed]
        known = {(Exchange(row.kind, row.local, row.nodes, row.groups), row.sent) for row in rows.collectives}
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
                alone = ", one group alone" if what.groups == "one" else ""
                self._report(f"{what.kind} over {what.local} x {what.nodes}{alone}, {format_bytes(size)}")
                share = min(1.0, max(0.0, left) / (len(wanted) - number) / 2)
                row = measure_exchange(what, size, self._groups, self._control, self._device, share)
                rows.collectives += (row,)
                known.add((what, sent))
                per_byte[what] = min(row.seconds / row.sent, per_byte.get(what, float("inf")))
            save()

    def handling(self) -> None:
        settings, rows = self._settings, self._rows
        if settings.weightless is None or rows.handling != Handling():
            return
        self._report("what the runtime takes of the processor")
        rows.handling = measure_handling(
            settings.weightless, settings.mesh, rows.collectives, rows.crowding, self._control, self._device
        )

    def codecs(self, deadline: Deadline) -> None:
        known = {(row.codec, row.dtype, row.numel) for row in self._rows.codecs}
        every = itertools.product(self._settings.codecs, ("bfloat16", "float32"), NUMELS)
        wanted = [codec for codec in every if codec not in known]
        for number, (name, dtype, numel) in enumerate(wanted):
            if deadline.passed() and number:
                self._report(f"no time left for codecs {', '.join(dict.fromkeys(n for n, _, _ in wanted[number:]))}")
                return
            self._report(f"codec {name} of {numel:,} values in {dtype}")
            share = max(0.0, deadline.left()) / (len(wanted) - number)
            self._rows.codecs += tuple(measure_codec(name, dtype, numel, self._control, self._device, share))


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
    return _Rows(**{each.name: getattr(earlier, each.name) for each in fields(_Rows)})


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

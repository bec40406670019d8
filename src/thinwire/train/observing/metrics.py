"""Metrics of a run: one JSON line per logged step, and the same numbers for trackers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from thinwire.checkpoint.durable import sync
from thinwire.train.directory import write_atomically, writing
from thinwire.train.observing.trackers import Trackers, flat

KINDS: Final = ("gather", "reduce", "sync", "spread", "control", "outer", "update", "up", "down")
"""What computation may wait for, in the order in which it is reported."""

_PEAK_TFLOPS: Final[tuple[tuple[str, float, float], ...]] = (
    # Name in the device's name; dense bfloat16 and float16; float32 without TF32. From the makers' data sheets.
    ("B200", 2250.0, 80.0),
    ("H200", 989.0, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("H800", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("A10G", 70.0, 35.0),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)


def known_peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak TFLOP/s of a GPU by the driver's name and a plan's dtype; ``None`` for a device that is not in the table."""
    for name, half, float32 in _PEAK_TFLOPS:
        if name in device_name:
            return float32 if dtype == "float32" else half
    if "V100" in device_name:  # which multiplies no bfloat16
        return {"float16": 125.0, "float32": 15.7}.get(dtype)
    return None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged step, over all ranks.

    Attributes:
        step: Number of updates, including this one.
        samples: Number of sequences consumed, including this step.
        tokens: Number of tokens consumed, including this step.
        loss: Training loss in nats per token, mean over ranks and micro-batches.
        val_loss: Validation loss in nats per token; ``None`` if this step did not validate.
        grad_norm: Norm of the mean gradient before clipping; of the first island, if there are several.
        lr: Learning rate of this update.
        skipped: Whether the update was skipped because a gradient was not finite.
        skipped_steps: Number of updates of the run that were skipped, including this one.
        loss_scale: Factor of the loss in this step's backward; ``None`` if the plan has no float16 gradients.
        step_seconds: Wall time of the step in seconds, with the exchange of losses before it, without validation and
            saving.
        tokens_per_second: Tokens per second over all ranks.
        tgs: Tokens per second and device.
        mfu: Model FLOPs utilization; attention is not halved for causality; ``None`` if the peak is unknown.
        memory: Bytes on the rank that uses the most: ``rss``, and on GPUs those of
            :data:`~thinwire.train.observing.measure.FIGURES`.
        retries: How often allocators of GPUs ran out of room and emptied their caches since the start, all ranks.
        sent: Bytes sent by all ranks since the last record, by kind, then ``inside`` and ``across`` nodes.
        exposed: Seconds that computation waited since the last record, by kind, mean over ranks.
        codec: Seconds that codecs took since the last record, by kind, mean over ranks.
        transfer: Seconds that transfers took since the last record, by kind, mean over ranks; waiting for peers is part
            of them.
        own: Seconds per step that ranks spent on their own work rather than waiting for communication: ``median``, and
            ``slowest`` with its ``rank``, which is left out where ranks cannot be compared.
        data_waits: Number of ``steps`` since the last record that waited for their data, and the ``seconds`` that they
            waited, summed over all ranks.
        exchanges: Exchanges of elastic islands since the last record: ``step``, the updates ``made`` for it, the
            numbers of the ``islands`` that exchanged and of those that ``came`` and fetched, the ``source`` from which
            this island has fetched, a ``checksum`` of what all of them then have, ``attempts``, and ``seconds`` until
            the parameters were new.
        slow: Sentence about a rank that has become slow or has caught up; usually ``None``.
        slow_link: Sentence about a link between hosts that has become slow or is fast again; usually ``None``.
        allocator: Sentence about a rank whose allocator ran out of room for the first time; usually ``None``.
        memory_by_rank: `memory` of every rank; ``None`` in most records, because its size grows with the ranks.
        time: Time of the record on rank 0, in seconds since 1970.
    """

    step: int
    samples: int
    tokens: int
    loss: float
    val_loss: float | None = None
    grad_norm: float
    lr: float
    skipped: bool
    skipped_steps: int = 0
    loss_scale: float | None = None
    step_seconds: float
    tokens_per_second: float
    tgs: float
    mfu: float | None
    memory: Mapping[str, int]
    retries: int = 0
    sent: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    exposed: Mapping[str, float] = field(default_factory=dict)
    codec: Mapping[str, float] = field(default_factory=dict)
    transfer: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)
    data_waits: Mapping[str, float] = field(default_factory=dict)
    exchanges: Sequence[Mapping[str, Any]] = ()
    slow: str | None = None
    slow_link: str | None = None
    allocator: str | None = None
    memory_by_rank: Mapping[str, Sequence[int]] | None = None
    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values for ``metrics.jsonl``. The key of `sent` is ``bytes``; numbers that are not finite
        are ``None``."""
        table = {name: finite(getattr(self, name)) for name in self.__dataclass_fields__}
        table["bytes"] = table.pop("sent")
        return table


class MetricsLog:
    """Appends records to ``metrics.jsonl``, and gives their numbers to trackers. Records after ``last_step`` are
    removed first, because a resumed run writes them again."""

    def __init__(self, path: Path, trackers: Trackers, last_step: int) -> None:
        truncate(path, last_step)
        self._path = path
        with writing(path):
            self._file: IO[str] = path.open("a", encoding="utf-8")
            sync(path.parent)
        self._trackers = trackers

    def write(self, record: StepRecord) -> None:
        """Append one record.

        Raises:
            UsageError: The record cannot be written, for example because the disk is full.
        """
        table = record.to_dict()
        with writing(self._path):
            self._file.write(json.dumps(table) + "\n")
            self._file.flush()
        self._trackers.log(record.step, tracked(table))

    def sync(self) -> None:
        """Write all records to disk. A run that goes on from a checkpoint after a loss of power does not repeat them.

        Raises:
            UsageError: They cannot be written.
        """
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file, whose errors :meth:`write` has reported, and close the trackers."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._trackers.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Read the records of ``metrics.jsonl`` in order. A last line that a crash cut short is skipped."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return records


def truncate(path: Path, last_step: int) -> None:
    """Remove the records after a step from ``metrics.jsonl``, which need not exist."""
    if path.is_file():
        kept = [record for record in read(path) if record["step"] <= last_step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def finite(value: Any) -> Any:
    """A value, or ``None`` for a number that is not finite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_TORCHTITANS: Final = {
    "loss": "loss_metrics/global_avg_loss",
    "val_loss": "validation_metrics/loss",
    "tokens": "n_tokens_seen",
    "tgs": "throughput(tps)",
    "mfu": "mfu(%)",
}
"""Names of torchtitan's for what means the same there; ``grad_norm`` and ``lr`` are the same as they are."""


def tracked(table: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under the names that trackers get."""
    named = {
        _TORCHTITANS.get(name, name): float(value)
        for name, value in flat(table, "/").items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
    if "mfu(%)" in named:
        named["mfu(%)"] *= 100
    return named

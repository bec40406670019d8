"""What a run reports: one JSON line per logged step, and the same numbers to TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from thinwire.train.directory import write_atomically, writing

KINDS: Final = ("gather", "reduce", "sync", "spread", "control")
"""Kinds of communication, in the order in which they are reported."""

_PEAK_TFLOPS: Final[tuple[tuple[str, float, float], ...]] = (
    # Name in the device's name; dense bfloat16; float32 without TF32. From the makers' data sheets.
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
    """Peak rate of a GPU.

    Args:
        device_name: as the driver gives it.
        dtype: ``bfloat16`` or ``float32``.

    Returns:
        TFLOP/s, or None for a device that is not in the table.
    """
    for name, bfloat16, float32 in _PEAK_TFLOPS:
        if name in device_name:
            return bfloat16 if dtype == "bfloat16" else float32
    return None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged step, over all ranks.

    Attributes:
        step: updates made, this one included.
        samples: sequences taken, this step included.
        tokens: tokens taken, this step included.
        loss: mean over ranks and micro-batches, nats per token.
        val_loss: nats per token; None where this step did not validate.
        grad_norm: of the mean gradient, before clipping.
        lr: learning rate of this update.
        skipped: whether the update was skipped for a gradient that is not finite.
        step_seconds: wall time of the step, without validation and saving.
        tokens_per_second: over all ranks.
        tgs: tokens per device and second.
        mfu: model FLOP utilisation, attention not halved; None where the peak is unknown.
        memory: bytes of the rank that has most: ``rss``, and ``cuda`` (peak allocated) on GPUs.
        sent: bytes sent by all ranks since the last record, by kind, ``inside`` and ``across`` nodes.
        exposed: seconds that computation waited since the last record, by kind, mean over ranks.
        codec: seconds that codecs took since the last record, by kind, mean over ranks.
        own: seconds of a step that ranks spent on their own work instead of waiting for communication: ``median``, and
            ``slowest``, which was that of ``rank``.
        slow: a sentence on a rank that holds the others up, or does no longer; None most of the time.
        memory_by_rank: like `memory`, of every rank; None in most records, as it grows with the ranks.
        time: seconds since 1970 when the record was made, on rank 0.
    """

    step: int
    samples: int
    tokens: int
    loss: float
    val_loss: float | None = None
    grad_norm: float
    lr: float
    skipped: bool
    step_seconds: float
    tokens_per_second: float
    tgs: float
    mfu: float | None
    memory: Mapping[str, int]
    sent: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    exposed: Mapping[str, float] = field(default_factory=dict)
    codec: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)
    slow: str | None = None
    memory_by_rank: Mapping[str, Sequence[int]] | None = None
    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """As written to ``metrics.jsonl``.

        Returns:
            Plain values; `sent` is called ``bytes``, and a number that is not finite is None.
        """
        table = {name: _finite(getattr(self, name)) for name in self.__dataclass_fields__}
        table["bytes"] = table.pop("sent")
        return table


class MetricsLog:
    """Appends records to ``metrics.jsonl`` and to TensorBoard.

    Args:
        path: the JSON lines.
        tensorboard: directory of the events; None writes none.
        last_step: records after this step are removed first: a run that resumes writes them again.
    """

    def __init__(self, path: Path, tensorboard: Path | None, last_step: int) -> None:
        truncate(path, last_step)
        self._path = path
        with writing(path):
            self._file: IO[str] = path.open("a")
        self._events: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(tensorboard), purge_step=last_step + 1)

    def write(self, record: StepRecord) -> None:
        """Append one record.

        Args:
            record: of the step.

        Raises:
            UsageError: there is no room.
        """
        table = record.to_dict()
        with writing(self._path):
            self._file.write(json.dumps(table) + "\n")
            self._file.flush()
            if self._events is not None:
                for name, value in _scalars(table):
                    self._events.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush and close both; what cannot be written has been reported by then."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            if self._events is not None:
                self._events.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Read records; a last line that a crash cut short is left out.

    Args:
        path: ``metrics.jsonl``.

    Returns:
        The records in order.
    """
    records = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def truncate(path: Path, last_step: int) -> None:
    """Remove the records after a step.

    Args:
        path: ``metrics.jsonl``; need not exist.
        last_step: the last step to keep.
    """
    if path.is_file():
        kept = [record for record in read(path) if record["step"] <= last_step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in ("step", "time"):
            yield f"{prefix}{name}", float(value)

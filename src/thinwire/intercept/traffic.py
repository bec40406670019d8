"""Counts what a compressed axis sent: which codecs were applied, and why others were not."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Calls of one operation with the same codec and reason.

    Attributes:
        op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"send"``, ``"recv"`` or another operation of
            torch.
        codec: Name of the codec; ``"none"`` if tensors were sent unencoded.
        why: Why tensors were sent unencoded although the axis has a codec; empty if they were encoded, or if the axis
            has no codec for this operation.
        calls: Number of tensors; a coalesced call counts each of its tensors.
        plain: Bytes that this rank would have sent without a codec.
        sent: Bytes that this rank sent. For unencoded operations, both are what a ring sends: ``2 (n - 1) / n`` of an
            all-reduce's tensor, ``n - 1`` of an all-gather's input, ``(n - 1) / n`` of a reduce-scatter's input.
    """

    op: str
    codec: str
    why: str
    calls: int
    plain: int
    sent: int
    across: int = 0


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """What one rank has sent on an axis since :func:`~thinwire.axis_traffic` was last asked to reset.

    Attributes:
        axis: Name of the axis.
        rows: Counts by operation, codec and reason.
        bypassed: Number of collectives that reached the transport without this group (see ``docs/intercept.md``).
        waited: Seconds that computation waited for the axis, including codecs on its thread; ``None`` if this is not
            measured.
    """

    axis: str
    rows: tuple[TrafficRow, ...]
    bypassed: int
    waited: float | None = None

    @property
    def sent(self) -> int:
        """Bytes sent."""
        return sum(row.sent for row in self.rows)

    @property
    def plain(self) -> int:
        """Bytes that would have been sent without codecs."""
        return sum(row.plain for row in self.rows)

    @property
    def across(self) -> int:
        """Bytes sent to other nodes in hops of their own."""
        return sum(row.across for row in self.rows)

    @property
    def codecs(self) -> frozenset[str]:
        """Names of the codecs that encoded something."""
        return frozenset(row.codec for row in self.rows if row.codec != "none")

    def encoded(self, op: str) -> int:
        """Number of encoded tensors of an operation."""
        return sum(row.calls for row in self.rows if row.op == op and row.codec != "none")

    def __str__(self) -> str:
        lines = [f"{self.axis}: {self.sent} bytes sent, {self.plain} without codecs"]
        lines += [
            f"  {row.op:15} {row.codec:18} {row.calls:7} calls {row.plain:14} -> {row.sent:14} bytes"
            + (f", {row.across} of them across nodes" if row.across else "")
            + (f"  ({row.why})" if row.why else "")
            for row in self.rows
        ]
        if self.bypassed:
            lines.append(f"  {self.bypassed} collectives went around the axis's group")
        return "\n".join(lines)


class Ledger:
    """Adds up counts, from any thread."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], list[int]] = {}
        self._lock = threading.Lock()

    def add(self, op: str, codec: str, plain: int, sent: int, *, across: int = 0, why: str = "") -> None:
        """Count a tensor."""
        with self._lock:
            row = self._rows.setdefault((op, codec, why), [0, 0, 0, 0])
            row[0] += 1
            row[1] += plain
            row[2] += sent
            row[3] += across

    def rows(self, *, reset: bool) -> tuple[TrafficRow, ...]:
        """In the order in which they first came."""
        with self._lock:
            rows = tuple(TrafficRow(*key, *counts) for key, counts in self._rows.items())
            if reset:
                self._rows = {}
        return rows

"""A whole run, as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire_bench.codecs.accuracy import Accuracy, Blocking
from thinwire_bench.codecs.goals import CodecGoal
from thinwire_bench.codecs.peers import PeerStatus
from thinwire_bench.codecs.soundness import CodecGate
from thinwire_bench.codecs.speeds import CodecSpeed

__all__ = ["CodecStudy"]


@dataclass(frozen=True)
class CodecStudy:
    """Everything a run found.

    Attributes:
        device: name of the processor or GPU.
        backend: of the codecs.
        threads: of the codecs; memcpy has one.
        rounds: that every job was timed in.
        codecs: in the order they were named.
        speeds: of codecs, peers and memcpy; codecs on a red gate have none.
        accuracies: of codecs and peers on data sets.
        blockings: what one scale for everything costs.
        peers: which took part.
        gates: one for each codec, dtype and size.
        goals: reached and missed.
        notes: what a reader should know before believing the figures.
        environment: machine, versions, date.
        command: that was typed.
    """

    device: str
    backend: str
    threads: int
    rounds: int
    codecs: tuple[str, ...]
    speeds: Sequence[CodecSpeed]
    accuracies: Sequence[Accuracy]
    blockings: Sequence[Blocking]
    peers: Sequence[PeerStatus]
    gates: Sequence[CodecGate]
    goals: Sequence[CodecGoal]
    notes: Sequence[str]
    environment: Mapping[str, Any]
    command: str

    @property
    def refused(self) -> dict[str, str]:
        """Codecs on a red gate, and why."""
        return {f"{gate.codec} ({gate.dtype})": gate.problem for gate in self.gates if gate.problem is not None}

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> CodecStudy:
        """The inverse of :meth:`plain`."""
        rows = {
            "speeds": CodecSpeed,
            "accuracies": Accuracy,
            "blockings": Blocking,
            "peers": PeerStatus,
            "gates": CodecGate,
            "goals": CodecGoal,
        }
        made: dict[str, Any] = {name: [kind(**row) for row in content[name]] for name, kind in rows.items()}
        return cls(**{**content, **made})

"""A whole run, as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire_bench.codecs.accuracy import Accuracy, Blocking
from thinwire_bench.codecs.goals import CodecGoal
from thinwire_bench.codecs.peers import PeerStatus
from thinwire_bench.codecs.soundness import CodecGate
from thinwire_bench.codecs.speeds import CodecSpeed


@dataclass(frozen=True)
class CodecStudy:
    """Everything a run found.

    Attributes:
        device: Name of the processor or GPU.
        backend: Backend of the codecs.
        threads: Threads of the codecs; memcpy has one.
        rounds: Rounds in which every call was timed.
        codecs: Names of the codecs, in the order of the command.
        speeds: Speeds of codecs, peers and memcpy; a refused codec has none.
        accuracies: Errors of codecs and peers on data sets.
        blockings: What a single scale costs in accuracy.
        peers: Whether each peer took part.
        gates: Checks against the reference, one for each codec, dtype and size.
        goals: Goals, reached or missed.
        notes: What a reader should know about the reliability of the figures.
        environment: Machine, versions and date.
        command: The command line that the user typed.
        target_speeds: Speeds of codecs with each instruction set that was forced, and of memcpy beside them.
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
    target_speeds: Sequence[CodecSpeed] = ()

    @property
    def refused(self) -> dict[str, str]:
        """Codecs on a red gate, and why."""
        return {
            f"{gate.codec} ({gate.dtype}{f', {gate.target}' if gate.target else ''})": gate.problem
            for gate in self.gates
            if gate.problem is not None
        }

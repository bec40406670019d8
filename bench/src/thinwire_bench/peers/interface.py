"""The interface between a benchmark and a system: its description, the place of a rank, and a training step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class SystemKind(StrEnum):
    """The role of a system in a comparison."""

    PLAN = "plan"
    PEER = "peer"
    CHANGED = "changed"
    """A peer that changes the optimisation: shown, but no peer is the best by it, nor are its losses compared."""
    BOUND = "bound"


@dataclass(frozen=True)
class SystemSpec:
    """A system of a benchmark.

    Attributes:
        label: names it in results; unique in a run.
        builder: ``module:function``; called on every rank with a ``Place`` and the options, returns a ``System``.
        options: Options of the builder; they have to be picklable.
        kind: Its role in a comparison.
        joined: Whether its ranks join a gloo job before the builder is called.
        cycle: Steps after which its communication repeats; turns are made of whole cycles.
        gap: Steps from one of the exchanges of a cycle to the next; a turn begins with the step of an exchange.
    """

    label: str
    builder: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: SystemKind = SystemKind.PEER
    joined: bool = True
    cycle: int = 1
    gap: int = 1


@dataclass(frozen=True)
class Place:
    """The place of a rank in a cluster of ``nodes`` hosts, each of which holds ``local`` consecutive ranks."""

    rank: int
    nodes: int
    local: int

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.local

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self.rank % self.local


class System(ABC):
    """One way to train, on one rank: the model, the optimizer and the communication."""

    @abstractmethod
    def step(self, options: Mapping[str, Any]) -> float:
        """Train one step on the rank's next batch.

        Args:
            options: Options of the turn; ``clip`` is the bound on the gradient norm, or None.

        Returns:
            The loss on this rank's batch, in nats per token.
        """

    def settle(self) -> None:
        """Wait until nothing of the last step is under way any more; not timed."""
        return

    def predicted(self) -> int | None:
        """Bytes that this rank should send to other nodes in a step; None where the system does not tell."""
        return None

    def waited(self) -> dict[str, float]:
        """Seconds that computation waited since the last call, by lane; empty where the system does not tell."""
        return {}

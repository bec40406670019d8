"""What one rank does in a step, as instructions for the player.

Computation is a list of instructions: compute, start operations, wait for some, hold memory. Instructions name
operations by their place in a lane, counted back from the newest, so that equal blocks of a model have equal
instructions. A section of them may be repeated: a model of many equal blocks has the script of one with few, in which
one period of blocks is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from thinwire.cost import ModelPart, PricedStage, Rates
from thinwire.program import (
    Lane,
    Operation,
    StepProgram,
    UnitInfo,
)
from thinwire.program.stages import Stage
from thinwire.spec import Plan

__all__ = [
    "ACTIVATIONS", "GATHERED", "GRADIENTS", "Compute", "Execution", "Hold", "Instruction",
    "Pricing", "Ref", "Script", "Section", "Sections", "StartOperations",
    "StartedOperation", "UpdateParameters", "Wait", "Workload", "part_seconds",
]  # fmt: skip

Pricing = Callable[[Plan, Operation, Sequence[UnitInfo]], list[PricedStage]]
"""Prices an operation of a program over these units; returns its stages."""

GATHERED, GRADIENTS, ACTIVATIONS = "gathered parameters", "gradients on their way", "activations"
"""Names of the memory levels."""

Ref = tuple[Lane, int]
"""An operation, by its lane: counted back from the lane's newest, which is 0; a spread by its number from 0."""

Queue = tuple[Lane, Stage | None]
"""A stage of a lane; ``None`` if the operations of a lane run one after another as a whole."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step on one rank.

    Attributes:
        parts: Parts of the model, in the order of ``units``.
        units: Descriptions of the units for the program.
        seq: Tokens per sequence.
        clip: Whether the update waits for the gradient norm.
        kept: Bytes that each part keeps from its forward to its backward; empty if memory is not simulated.
        exchanges: Seconds that ranks which share a part exchange in one pass over it, while computation waits; empty if
            they exchange nothing.
    """

    parts: tuple[ModelPart, ...]
    units: tuple[UnitInfo, ...]
    seq: int
    clip: bool = False
    kept: tuple[int, ...] = ()
    exchanges: tuple[float, ...] = ()

    def exchanging(self, exchanges: tuple[float, ...]) -> Workload:
        """The work with these exchanges."""
        return replace(self, exchanges=exchanges)


def part_seconds(rates: Rates, part: ModelPart, plan: Plan, seq: int, exchange: float = 0.0) -> tuple[float, float]:
    """Seconds of the forward and of the backward of this rank's tokens through a part, exchanges included.

    Args:
        rates: Seconds of a part.
        part: The part.
        plan: The plan; ranks may share sequences.
        seq: Tokens per sequence.
        exchange: Seconds that ranks which share the part exchange in one pass over it.
    """
    forward, backward = rates.forward(part, plan, seq), rates.backward(part, plan, seq)
    return forward / plan.cp + exchange, backward / plan.cp + exchange


@dataclass(frozen=True, slots=True)
class Execution:
    """How another engine than thinwire's runtime performs a program.

    Attributes:
        pricing: Prices operations.
        revised: The program as the engine performs it.
        needed_first: Whether operations of the forward that computation waits for start before others of their event.
        holds_reductions: Whether reductions that nothing waits for start only once the next unit of the backward is
            gathered.
    """

    pricing: Pricing
    revised: Callable[[StepProgram], StepProgram] = lambda program: program
    needed_first: bool = False
    holds_reductions: bool = False


# -- instructions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartedOperation:
    """An operation that is started.

    Attributes:
        lane: Its lane.
        moves: Its stages, in order; the same object for operations of the same price.
        after: Operations that must end first.
        queues: Queues of its lane that it passes.
        update: Seconds of the optimizer's update of what this operation completes; ``None`` if it completes nothing.
        operation: The operation of the program.
    """

    lane: Lane
    moves: tuple[PricedStage, ...]
    after: tuple[Ref, ...]
    queues: tuple[Queue, ...]
    update: float | None
    operation: Operation = field(compare=False)


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation."""

    seconds: float
    name: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Wait:
    """Waiting for operations."""

    operations: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class StartOperations:
    """Start of operations."""

    launches: tuple[StartedOperation, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """A change of a memory level."""

    name: str
    change: int


@dataclass(frozen=True, slots=True)
class UpdateParameters:
    """The optimizer's update, of each unit when its gradients have arrived, or of all units once all have.

    Attributes:
        seconds: Seconds of the update of all units; ``None``: each waits for its own gradients only.
    """

    seconds: float | None


Instruction = Compute | Wait | StartOperations | Hold | UpdateParameters


@dataclass(frozen=True, slots=True)
class Section:
    """Instructions that are carried out one or several times.

    Attributes:
        instructions: The instructions.
        times: How often they are carried out.
        spreads: Spreads by which the references of each further time, and of what follows in the same pass, are further
            on.
    """

    instructions: tuple[Instruction, ...]
    times: int = 1
    spreads: int = 0


Sections = list[Section]


@dataclass(frozen=True, slots=True)
class Script:
    """The instructions of a step.

    Attributes:
        begin: What comes before the first forward.
        forwards: The forward of each micro-batch.
        backwards: The backward of each micro-batch.
        end: The update.
        units: Units of the program.
    """

    begin: Sections
    forwards: list[Sections]
    backwards: list[Sections]
    end: Sections
    units: tuple[UnitInfo, ...]

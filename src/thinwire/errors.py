"""The exception tree.

Every error that a user can cause derives from :class:`ThinwireError`. Its message names the key, its value, the valid
values and the remedy in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ThinwireError(Exception):
    """Base of every error thinwire raises on purpose."""


class SpecError(ThinwireError, ValueError):
    """A plan, recipe or other specification breaks one or more rules; the message lists all of them.

    Args:
        what: Name of the specification, for example ``plan.toml``.
        problems: One sentence per broken rule, which names the key, its value and the valid values; a single one as
            it is.
    """

    def __init__(self, what: str, problems: str | Sequence[str]) -> None:
        self.what = what
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{what}: {count} problem{'s' if count != 1 else ''}\n{lines}")


class UsageError(ThinwireError, RuntimeError):
    """The library was called in a way that it does not support; the message names the remedy."""


class MismatchError(ThinwireError, RuntimeError):
    """Two ranks disagree on the plan, the model or the order of units; the message names both ranks and both values."""


class CollectiveError(ThinwireError, RuntimeError):
    """A collective failed or timed out; the message names the operation, the group and the last progress."""


class WireError(ThinwireError, ValueError):
    """A message cannot be decoded: it is truncated or corrupt, or it was made by another codec."""


class CheckpointError(ThinwireError, RuntimeError):
    """A checkpoint is missing, incomplete or corrupt; the message names the file."""


class DataError(ThinwireError, ValueError):
    """Training data is missing, empty or malformed; the message names the path."""


class ReplicaError(ThinwireError, RuntimeError):
    """Ranks hold different bits of what must be equal: a processor, a memory chip or a link is faulty."""


class NonFiniteError(ThinwireError, ArithmeticError):
    """A loss or gradient norm became NaN or infinite."""


@dataclass(frozen=True)
class Room:
    """Memory that a rank may use.

    Attributes:
        kind: Kind of memory, in words.
        limit: Bytes that the rank may use.
        base: Bytes of these that were in use before there was a model.
    """

    kind: str
    limit: int
    base: int


class OutOfMemoryError(ThinwireError, MemoryError):
    """A rank needed more memory than it may use.

    Args:
        message: Names the rank and what it was doing.
        room: Memory that the rank may use.
    """

    def __init__(self, message: str, room: Room) -> None:
        self.room = room
        super().__init__(message)

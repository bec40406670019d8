"""The exception tree. Every error a user can cause derives from :class:`ThinwireError` and says, in one
sentence, which key has which value, what would be valid, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ThinwireError(Exception):
    """Base of every error thinwire raises on purpose."""


class SpecError(ThinwireError, ValueError):
    """A plan, recipe or other specification breaks one or more rules; all of them are listed at once.

    Args:
        what: what was being read, for example ``plan.toml``.
        problems: one sentence per broken rule, each naming key, value and valid values.
    """

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.what = what
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{what}: {count} problem{'s' if count != 1 else ''}\n{lines}")


class UsageError(ThinwireError, RuntimeError):
    """The library was called in a way it cannot honour; the message names the remedy."""


class MismatchError(ThinwireError, RuntimeError):
    """Two ranks disagree (plan, model, order of units); the message names both ranks and both sides."""


class CollectiveError(ThinwireError, RuntimeError):
    """A collective failed or timed out; the message names the operation, the group and the last progress."""


class WireError(ThinwireError, ValueError):
    """A message cannot be decoded: it is truncated or corrupt, or it was made by another codec."""


class CheckpointError(ThinwireError, RuntimeError):
    """A checkpoint is missing, incomplete or corrupt; the message names the file."""


class DataError(ThinwireError, ValueError):
    """Training data is missing, empty or malformed; the message names the path."""


class NonFiniteError(ThinwireError, ArithmeticError):
    """A loss or gradient norm became NaN or infinite."""


@dataclass(frozen=True)
class Room:
    """Memory of a rank.

    Attributes:
        kind: what is limited, in words.
        limit: bytes that it may use.
        base: bytes of these in use before there was a model.
    """

    kind: str
    limit: int
    base: int


class OutOfMemoryError(ThinwireError, MemoryError):
    """A rank needed more memory than there is.

    Args:
        message: who, while doing what.
        room: of the rank.
    """

    def __init__(self, message: str, room: Room) -> None:
        self.room = room
        super().__init__(message)

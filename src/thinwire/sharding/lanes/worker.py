"""What lanes need of a worker, which runs the bodies of one stage, and of the tickets that it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from thinwire.sharding.lanes.recorder import Recorder

Body: TypeAlias = Callable[[], None]


def nothing() -> None:
    """The body of a ticket whose work is done."""


class Ticket(ABC):
    """A submitted body. The ticket keeps the body's memory alive until the body has finished.

    Attributes:
        failed: Whether the body, or what it had to wait for, has raised on a thread of its own.
    """

    failed = False

    @abstractmethod
    def wait(self) -> None:
        """Let computation continue only after the body has finished; re-raises the body's error."""

    @abstractmethod
    def settle(self) -> None:
        """Block the host until the body has finished; re-raises the body's error."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the body has finished; does not wait."""


class Worker(ABC):
    """Runs the bodies of one stage of a lane."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    @abstractmethod
    def submit(self, body: Body, after: Sequence[Ticket], label: str) -> Ticket: ...

    @abstractmethod
    def exposed(self) -> float:
        """Seconds that computation waited for this worker since the last call."""

    @abstractmethod
    def worked(self) -> float:
        """Seconds that the worker's bodies took since the last call, including waiting for peers."""

    @abstractmethod
    def drain(self) -> None:
        """Block until everything submitted has run."""

    @abstractmethod
    def close(self) -> None: ...

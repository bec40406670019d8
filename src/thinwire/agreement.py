"""Runs an action on all ranks, so that every rank succeeds or every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from thinwire.errors import ThinwireError

__all__ = ["Ranks", "agree", "describe"]

T = TypeVar("T")


class Ranks(Protocol):
    """A group of ranks with the only collective that agreement needs."""

    @property
    def rank(self) -> int:
        """Index of this process in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather_object(self, obj: Any, /) -> list[Any]:
        """Return every rank's object, by rank."""


def describe(error: BaseException) -> str:
    """Describe an error for the other ranks; errors of other libraries include the name of their class."""
    return str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"


def agree(
    ranks: Ranks,
    action: Callable[[], T],
    explain: Callable[[Mapping[int, str]], Exception],
    *,
    raises_own: bool = False,
    message: Callable[[BaseException], str] = describe,
) -> list[T]:
    """Run an action on every rank and exchange the outcomes. Collective.

    1. Each rank runs its action, which must not communicate.
    2. Ranks exchange results and messages; messages are plain text, since some exceptions do not survive pickling.
    3. If any action failed, every rank raises. Otherwise every rank returns all results.

    Args:
        ranks: The ranks.
        action: Action of this rank.
        explain: Creates the error from the messages of the ranks that failed, by rank.
        raises_own: Whether a rank raises its own exception, if it has one, rather than the error of ``explain``.
        message: Describes an exception for the other ranks.

    Returns:
        Every rank's result, by rank.

    Raises:
        Exception: An action failed. The error is the result of ``explain``, caused by this rank's own exception if it
            has one, or that exception itself.
    """
    result: T | None = None
    problem: str | None = None
    cause: BaseException | None = None
    try:
        result = action()
    except BaseException as error:  # the other ranks are waiting, so even an interrupt is announced first
        cause, problem = error, message(error)
    outcomes = ranks.all_gather_object((problem, result))
    if cause is not None and (raises_own or not isinstance(cause, Exception)):
        raise cause
    problems = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
    if problems:
        raise explain(problems) from cause
    return [value for _, value in outcomes]

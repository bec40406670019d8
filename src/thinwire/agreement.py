"""Acting together: every rank succeeds, or every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from thinwire.errors import ThinwireError

__all__ = ["Ranks", "agree", "describe"]

T = TypeVar("T")


class Ranks(Protocol):
    """Some ranks, and the one collective that agreement needs."""

    @property
    def rank(self) -> int:
        """This process's index."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather_object(self, obj: Any, /) -> list[Any]:
        """Return every rank's object, by rank."""


def describe(error: BaseException) -> str:
    """The message of an error for the other ranks; errors of others' code are named by their class too."""
    return str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"


def agree(
    ranks: Ranks,
    action: Callable[[], T],
    explain: Callable[[Mapping[int, str]], Exception],
    *,
    raises_own: bool = False,
    message: Callable[[BaseException], str] = describe,
) -> list[T]:
    """Run an action on every rank and learn how all ranks fared. Collective.

    1. Each rank runs its action, which must not communicate.
    2. Ranks exchange results and messages; messages are plain text, since some exceptions do not survive pickling.
    3. If any action failed, every rank raises. Otherwise every rank returns all results.

    Args:
        ranks: the ranks.
        action: this rank's part.
        explain: makes the error from the messages of the ranks that failed, by rank.
        raises_own: whether a rank whose action failed raises its own exception instead.
        message: makes the text that the other ranks receive of an exception.

    Returns:
        Every rank's result, by rank.

    Raises:
        Exception: what ``explain`` makes, caused by this rank's own exception if it had one; or that one itself.
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

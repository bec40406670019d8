"""What ranks tell each other apart from tensors: values of a stated type, and whether an action has succeeded.

Values travel as JSON that the receiver checks against the type, never as pickles: a message is a value or an error, and
cannot run code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from thinwire.errors import CollectiveError, ThinwireError

T = TypeVar("T")

_CONFIG = ConfigDict(strict=True, ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64")


class Typed(Generic[T]):
    """How values of one type become messages between ranks.

    Args:
        kind: The type: numbers, text, bytes, ``None``, dataclasses of such, and ``list[...]``, ``tuple[...]``,
            ``set[...]`` and ``dict[...]`` of them. ``object`` stands for whatever JSON can say, with tuples as lists.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def encode(self, value: T) -> bytes:
        """The message.

        Raises:
            TypeError: The value is of another type.
        """
        try:
            return self._adapter.dump_json(self._adapter.validate_python((value,)))
        except (ValidationError, PydanticSerializationError) as error:
            raise TypeError(f"not a value of {self._kind}: {error}") from error

    def decode(self, message: bytes) -> T:
        """The value.

        Raises:
            CollectiveError: The message is none of such a value.
        """
        try:
            (value,) = self._adapter.validate_json(message)
        except ValidationError as error:
            what = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise CollectiveError(f"a rank sent {len(message)} bytes that are not {self._kind}: {what}") from error
        return value

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[tuple[T]]:
        # A tuple, because a type with a configuration of its own takes no other.
        return TypeAdapter(tuple[self._kind], config=_CONFIG)  # type: ignore[name-defined]

    @functools.cached_property
    def outcome(self) -> Typed[tuple[str | None, T | None]]:
        """How outcomes of an action travel: what went wrong, or ``None`` and a value."""
        kind: Any = None if self._kind is None else self._kind | None
        return Typed(tuple[str | None, kind])


NOTHING: Final[Typed[None]] = Typed(None)
"""Of actions that return nothing."""


class Ranks(Protocol):
    """A group of ranks with the only collective that agreement needs."""

    @property
    def rank(self) -> int:
        """Index of this process in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather_bytes(self, message: bytes, /) -> list[bytes]:
        """Return every rank's message, by rank."""


def all_gather_typed(ranks: Ranks, value: T, typed: Typed[T]) -> list[T]:
    """The values of all ranks, by rank. Collective."""
    return [typed.decode(message) for message in ranks.all_gather_bytes(typed.encode(value))]


def describe(error: BaseException) -> str:
    """Describe an error for the other ranks; errors of other libraries include the name of their class."""
    return str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"


def agree(
    ranks: Ranks,
    action: Callable[[], T],
    explain: Callable[[Mapping[int, str]], Exception],
    typed: Typed[T],
    *,
    raises_own: bool = False,
    message: Callable[[BaseException], str] = describe,
) -> list[T]:
    """Run an action on every rank and exchange the outcomes. Collective.

    1. Each rank runs its action, which must not communicate.
    2. Ranks exchange results and what went wrong, in plain text.
    3. If any action failed, every rank raises. Otherwise every rank returns all results.

    Args:
        ranks: The ranks.
        action: Action of this rank.
        explain: Creates the error from the messages of the ranks that failed, by rank.
        typed: Type of the results; :data:`NOTHING` for actions without one.
        raises_own: Whether a rank raises its own exception, if it has one, rather than the error of ``explain``.
        message: Describes an exception for the other ranks.

    Returns:
        Every rank's result, by rank.

    Raises:
        Exception: An action failed. The error is the result of ``explain``, caused by this rank's own exception if it
            has one, or that exception itself.
    """
    outcome = typed.outcome
    cause: BaseException | None = None
    try:
        mine = outcome.encode((None, action()))
    except BaseException as error:  # the other ranks are waiting, so even an interrupt is announced first
        cause = error
        # Names of files may contain what is no Unicode.
        mine = outcome.encode((message(error).encode("utf-8", "backslashreplace").decode(), None))
    outcomes = [outcome.decode(theirs) for theirs in ranks.all_gather_bytes(mine)]
    if cause is not None and (raises_own or not isinstance(cause, Exception)):
        raise cause
    problems = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
    if problems:
        raise explain(problems) from cause
    return [cast("T", value) for _, value in outcomes]

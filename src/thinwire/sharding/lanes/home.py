"""The stream on which a model was sharded, to which the memory of its units and gradients belongs.

A model may run some of its modules on streams of its own, and autograd runs their backward there. The runtime does its
work at home, whatever stream calls it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from thinwire.collectives.links.streams import Streams

Hook = TypeVar("Hook", bound=Callable[..., Any])


class HomeStream:
    """The current stream at the time of its creation.

    Args:
        streams: Streams of the device; ``None`` if it has none.

    Attributes:
        exists: Whether the device has streams.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._stream = None if streams is None else streams.current()
        self.exists = streams is not None

    def is_elsewhere(self) -> bool:
        """Whether the current stream is another one."""
        return self._streams is not None and self._streams.current() != self._stream

    @contextlib.contextmanager
    def visit(self) -> Iterator[bool]:
        """Queue what the block does on the home stream, after what the current stream has queued and before what it
        will queue.

        Yields:
            Whether the current stream is another one. Memory of that stream may be dropped after the block only.
        """
        streams, home = self._streams, self._stream
        if streams is None or home is None or (current := streams.current()) == home:
            yield False
            return
        home.wait_stream(current)
        with streams.use(home):
            yield True
        current.wait_stream(home)

    def visited_by(self, hook: Hook) -> Hook:
        """Decorator of hooks that are called on any stream."""
        if not self.exists:
            return hook

        @functools.wraps(hook)
        def visit(*args: Any, **kwargs: Any) -> Any:
            with self.visit():
                return hook(*args, **kwargs)

        return cast(Hook, visit)

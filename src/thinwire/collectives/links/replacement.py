"""A maker of connections or streams that tests replace with a double's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

Maker = TypeVar("Maker")


class Replacement(Generic[Maker]):
    """What stands in for a maker, inside a context; ``maker`` is ``None`` outside of it."""

    def __init__(self) -> None:
        self.maker: Maker | None = None

    @contextlib.contextmanager
    def use(self, maker: Maker) -> Iterator[None]:
        """Use another maker inside the context; contexts nest."""
        before, self.maker = self.maker, maker
        try:
            yield
        finally:
            self.maker = before

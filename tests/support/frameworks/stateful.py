"""What loops register for checkpoints beside models and optimizers."""

from __future__ import annotations


class Counter:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

"""When islands exchange."""

from __future__ import annotations

import pytest

from thinwire.program import due_fragments, next_exchange
from thinwire.spec import Plan


@pytest.mark.parametrize("schedule", [[], [[0.5, 8]], [[0.3, 64]], [[1 / 3, 8], [0.7, 24]]], ids=str)
@pytest.mark.parametrize("steps", [100, 333])
def test_the_next_exchange_is_that_of_an_island_that_gets_there(schedule: list[list[float]], steps: int) -> None:
    """``every`` may change before: an island that names another step would lead the others, or come in vain."""
    islands = {"count": 2, "every": 32, "fragments": 2, "schedule": schedule}
    plan = Plan.preset("zero1", nodes=1, local=1).with_(islands=islands)
    made = [(step, due) for step in range(1, steps + 1) if (due := due_fragments(plan, step, (step - 1) / steps))]
    for step in range(2, made[-1][0] + 1):
        assert next_exchange(plan, step, (step - 1) / steps) == next(known for known in made if known[0] >= step)

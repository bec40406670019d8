"""The report names the rank that slows down the others, and no other rank."""

from __future__ import annotations

from thinwire.plan.after.culprit import measured_parts
from thinwire.train.observing.pace import RECORDS, Pace, summarized

HOSTS = ("a", "a", "b", "b")


def said(pace: Pace, *own: float, records: int = RECORDS) -> list[str]:
    sentences = (pace.add(own, max(own)) for _ in range(records))
    return [text for text in sentences if text is not None]


def test_equal_ranks_are_not_compared_aloud() -> None:
    assert said(Pace(HOSTS), 1.0, 1.1, 0.9, 1.2, records=50) == []
    assert said(Pace(HOSTS), 1e-4, 1e-4, 1e-4, 9e-4, records=50) == []
    assert said(Pace(("a",)), 1.0, records=50) == []


def test_a_slow_rank_is_named_once_and_again_when_it_keeps_up() -> None:
    pace = Pace(HOSTS)
    (first,) = said(pace, 1.0, 1.0, 1.5, 1.1, records=40)
    assert first == (
        "rank 2 on b is slow: a step takes it 1.5 s of its own work and the others 1 s in the median, 50% more; "
        "all wait for it"
    )
    assert said(pace, 1.0, 1.0, 1.0, 1.0, records=40) == ["rank 2 on b keeps up with the others again"]
    assert said(pace, 1.0, 1.0, 1.0, 1.0, records=40) == []


def test_only_the_island_of_a_slow_rank_waits_for_it() -> None:
    (first,) = said(Pace(HOSTS, islands=2), 1.0, 1.0, 1.5, 1.1)
    assert first.endswith("50% more; its island waits for it, and the others when they exchange")


def test_a_single_disturbance_names_no_rank() -> None:
    pace = Pace(HOSTS)
    for number in range(40):
        assert pace.add((1.0, 9.0 if number % 8 == 0 else 1.0, 1.0, 1.0), 9.0) is None


def test_a_moment_of_short_steps_names_no_rank() -> None:
    pace = Pace(("a", "b"))
    turns = ((0.02, 0.03), (0.03, 0.02))
    assert not any(pace.add(turns[number // 20 % 2], 0.03) for number in range(400))
    assert sum(pace.add((0.02, 0.03), 0.03) is not None for _ in range(400)) == 1


def test_one_of_two_can_be_slow() -> None:
    assert len(said(Pace(("a", "b")), 2.0, 1.0)) == 1


def test_others_may_do_nothing_but_wait() -> None:
    (first,) = said(Pace(("a", "b")), 0.5, 0.0)
    assert first.endswith("of its own work and the others 0 s in the median; all wait for it")


def test_a_record_keeps_the_slowest() -> None:
    assert summarized([1.0, 3.0, 2.0], comparable=True) == {"median": 2.0, "slowest": 3.0, "rank": 1}


def test_a_record_names_no_rank_where_ranks_cannot_be_compared() -> None:
    """Nor does the report then, which takes no lag of a rank out of transfers."""
    own = summarized([1.0, 3.0, 2.0], comparable=False)
    assert own == {"median": 2.0, "slowest": 3.0}
    rows = [({"step": step, "step_seconds": 3.0, "own": own, "transfer": {"sync": 2.0}}, 1) for step in range(1, 9)]
    found = measured_parts(rows, 3)
    assert (found["the slowest rank"], found["transfers of sync"]) == (0.0, 2.0)

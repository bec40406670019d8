"""What `thinwire bench checkpoint` measures and how its tables judge it."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire_bench.study.checkpoints import Background, CheckpointTimes, FileTimes, goals, sheets, study


def measured(save: float = 1.2, cost: float = 0.3, memory: float = 1.0) -> CheckpointTimes:
    files = (
        FileTimes("save: a plain file", (1.0, 2.0, 4.0)),
        FileTimes("save: thinwire", (save, 2 * save, 4 * save), 0.1),
        FileTimes("load: a plain file", (1.0, 1.0, 1.0)),
        FileTimes("load: thinwire", (1.1, 1.2, 9.0)),
    )
    background = Background(
        "thinwire",
        step=(0.5, 0.5, 0.5),
        call=(0.1, 0.1, 0.1),
        first_call=0.2,
        cost=(cost, cost, cost),
        steps=(1, 2, 3),
        memory=memory,
    )
    return CheckpointTimes(400 << 20, 2, files, (background,))


def test_ratios_are_those_of_a_round_and_goals_are_judged_by_their_median() -> None:
    rows = {row[0]: row[1:] for row in goals(measured()).rows}
    assert rows["save over a plain file"] == ["1.20", "1.3", ""]
    assert rows["load over a plain file"] == ["1.20", "1.3", ""]
    assert rows["cost of a save in the background in steps"] == ["0.60", "1.0", ""]
    assert rows["memory added over what a rank saves"] == ["1.00", "1.1", ""]


@pytest.mark.parametrize(
    ("missed", "row"), [({"save": 1.4}, 0), ({"cost": 0.6}, 2), ({"memory": 1.2}, 3)], ids=["save", "cost", "memory"]
)
def test_a_missed_goal_is_said(missed: dict[str, float], row: int) -> None:
    marks = [cells[-1] for cells in goals(measured(**missed)).rows]
    assert marks == ["missed" if index == row else "" for index in range(4)]


def test_tables_have_speed_ratio_and_spread() -> None:
    files, background = sheets(measured())
    assert files.rows[1] == ["save", "thinwire", "2.40 (1.20 to 4.80)", "166.7 MiB/s", "1.20 (1.20 to 1.20)", "0.10"]
    expected = ["thinwire", "500 (500 to 500)", "100 (100 to 100)", "200", "0.60 (0.60 to 0.60)", "2", "1.00"]
    assert background.rows == [expected]


@pytest.mark.slow
def test_every_action_is_measured_once_a_round(tmp_path: Path) -> None:
    result = study(ranks=2, model="llama-1m", seq=16, rounds=2, steps=2, directory=tmp_path, report=str)
    names = {sample.name for sample in result.files}
    plain = {f"save: {kind}" for kind in ("a plain file", "a plain file past the page cache")} | {"load: a plain file"}
    assert names == plain | {f"{what}: {system}" for what in ("save", "load") for system in ("thinwire", "DCP")}
    assert all(len(sample.seconds) == 2 and min(sample.seconds) > 0 for sample in result.files)
    assert [save.name for save in result.background] == ["thinwire", "DCP"]
    assert all(len(save.cost) == 2 and all(1 <= steps <= 3 for steps in save.steps) for save in result.background)
    assert not list(tmp_path.iterdir()), "what it wrote is gone"

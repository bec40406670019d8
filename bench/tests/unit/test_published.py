"""The simulator against publications: errors within their goals, and systems in the published order."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.sim import answer
from thinwire_bench.published import TABLES, RowComparison, Table, fits, mean_error, reproduce
from thinwire_bench.published.calibration import rows
from thinwire_bench.published.zeropp import technique_cases

CLOSE = 0.10
"""Published figures closer than this may change places."""


def test_every_row_says_where_it_is_from() -> None:
    assert len(rows()) > 200
    assert all(row.source and row.where and row.metric for row in rows())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_tables_are_reproduced(table: Table) -> None:
    """Near enough, and with systems of the same model, accelerators, links and batch in the published order."""
    reproduced = reproduce(table)
    assert reproduced
    if table.goal is not None:
        assert mean_error(reproduced) <= table.goal

    def alike(each: RowComparison) -> tuple[str, ...]:
        row = each.row
        shape = (row.model, row.gpus, row.gpu_type, row.internode_gbps, row.micro_batch_tokens, row.micro_batches)
        return (*map(str, shape), row.metric)

    for _, group in itertools.groupby(sorted(reproduced, key=alike), key=alike):
        for one, other in itertools.permutations(group, 2):
            first, second = (each.row.value / 100 if each.in_points else each.row.value for each in (one, other))
            if first > second + CLOSE if one.in_points else first > (1 + CLOSE) * second:
                assert one.simulated > other.simulated, (one.row.system, other.row.system)


@pytest.mark.slow
def test_the_command_writes_tables_and_pictures(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin = "<!-- results: begin (written by `thinwire reproduce all --page`) -->"
    page.write_text(f"# Reproduction\n\n{begin}\n\n<!-- results: end -->\n")
    command = [sys.executable, "-m", "thinwire.cli.main", "reproduce"]
    done = subprocess.run(
        [*command, "amsp", "--json", "--page", str(page), "--pictures", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)
    assert [table["name"] for table in tables] == ["amsp"] * 5
    assert len(tables[0]["rows"]) == 32
    assert "AMSP, Table V" in page.read_text()
    assert (tmp_path / "amsp-1.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "amsp-traces.png").read_bytes().startswith(b"\x89PNG")
    wrong = subprocess.run([*command, "nobody"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert (
        "there is no publication 'nobody'; valid are amsp, internevo, zeropp, efa, hybrid, memory, all" in wrong.stderr
    )


@pytest.mark.parametrize(
    ("gbps", "tokens"), [(100, 512), (100, 1024), (100, 2048), (800, 256), (800, 1024), (800, 2048)]
)
def test_all_techniques_together_gain_most(gbps: int, tokens: int) -> None:
    """On slow links qwZ gains most alone, as published; on fast ones qgZ gains nothing, against what was published."""
    row = next(row for row in rows() if row.system == "single technique")
    alone, together = (
        [answer(case.with_(internode_gbps=gbps, micro_batch_tokens=tokens)).simulated.seconds for case in cases]
        for cases in (technique_cases(row), technique_cases(dataclasses.replace(row, system="ZeRO++ vs ZeRO-3")))
    )
    qwz, hpz, qgz = (alone[0] / seconds for seconds in alone[1:])
    assert together[0] / together[1] > max(qwz, hpz) > min(qwz, hpz) > max(1.02, qgz)
    if gbps == 100:
        assert qwz > hpz > qgz > 1.0


@pytest.mark.slow
def test_every_training_run_that_was_published_fits() -> None:
    """But for one that did not, what is counted without memory, and generation."""
    for table in TABLES:
        apart = table.title.startswith("ZeRO++, RLHF")
        for row in table.rows:
            if apart or row.metric in ("OOM", "memory_GB", "memory_ratio"):
                continue
            for answered in map(answer, table.cases(row)):
                assert answered.memory.total <= answered.cluster.memory, (row.model, row.system)


def test_every_fitted_table_says_how_well_it_is_predicted_when_left_out() -> None:
    for table in TABLES:
        if table.system and table.goal is not None:
            fit = fits()[table.system]
            assert 0 < fit.left_out[table.title] < 0.25
            assert len(fit.constants) < len(table.rows) or len(fit.left_out) > 1


def test_models_and_clusters_are_left_out_as_a_whole() -> None:
    groups = {(name, group.by): fit.groups for name, fit in fits().items() for group in fit.groups}
    assert set(groups) == {
        ("amsp", "model"), ("amsp", "cluster"), ("deepspeed", "model"), ("deepspeed", "cluster"),
    }  # fmt: skip
    for (name, _), every in groups.items():
        rows = [row for table in TABLES if table.system == name and table.goal is not None for row in table.rows]
        for group in every:
            assert 0 < group.error < 0.25
            if group.by == "model":
                assert group.rows == sum(row.model.split(" (")[0] == group.group for row in rows)
            else:
                names = [f"{row.gpus} {row.gpu_type}, {row.internode_gbps:g} Gbit/s" for row in rows]
                assert group.rows == names.count(group.group)

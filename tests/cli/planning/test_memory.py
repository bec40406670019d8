"""``thinwire memory``: plans and other systems in one table, for every way to name a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.families.tiny import FAMILIES
from tests.support.paths import ROOT
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cost import OVERHEAD, largest_memory
from thinwire.spec import ModelSpec, Plan

CLUSTER = ("--cluster", "a800-80g:2x8")


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["memory", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def by_plan(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{row['system']} {row['plan']}": row for row in document["estimates"]}


def test_presets_and_other_systems_share_a_table() -> None:
    document = run("llama-7b", *CLUSTER)
    rows = by_plan(document)
    assert {f"thinwire {name}" for name in Plan.preset_names()} < set(rows)
    others = {"PyTorch DDP, autocast", "PyTorch FSDP2", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3"}
    assert others < set(rows)
    totals = [row["memory_bytes"]["total"] for row in document["estimates"]]
    assert totals == sorted(totals)
    assert not rows["thinwire ddp"]["fits"]
    assert rows["thinwire zero3"]["fits"]


def test_a_plan_has_the_memory_of_the_planner() -> None:
    rows = by_plan(run("llama-7b", *CLUSTER, "--plan", "hpz", "--no-peers", "--micro-batches", "4", "--recompute"))
    assert set(rows) == {"thinwire hpz"}
    plan = Plan.preset("hpz", nodes=2, local=8, micro_batches=4, recompute=True)
    model = ModelSpec.preset("llama-7b")
    expected = largest_memory(model, plan, seq=model.seq, overhead=OVERHEAD)
    assert rows["thinwire hpz"]["memory_bytes"] == {**expected.by_part(), "total": expected.total}


def test_a_plan_file_is_taken_as_it_is(tmp_path: Path) -> None:
    Plan.preset("zero2", nodes=2, local=8, micro_batch=3).save(tmp_path / "plan.toml")
    (row,) = by_plan(run("llama-7b", *CLUSTER, "--plan", str(tmp_path / "plan.toml"), "--no-peers")).values()
    (other,) = by_plan(run("llama-7b", *CLUSTER, "--plan", "zero2", "--micro-batch", "3", "--no-peers")).values()
    assert row["memory_bytes"] == other["memory_bytes"]


def test_other_systems_have_the_batch_of_a_plan_file(tmp_path: Path) -> None:
    batch = {"micro_batch": 3, "micro_batches": 2, "recompute": True}
    path = str(tmp_path / "plan.toml")
    Plan.preset("zero2", nodes=2, local=8, **batch).save(path)
    of_options = by_plan(run("llama-7b", *CLUSTER, "--micro-batch", "3", "--micro-batches", "2", "--recompute"))
    rows = by_plan(run("llama-7b", *CLUSTER, "--plan", path, "--plan", "zero3"))
    rows["thinwire zero2"] = rows.pop(f"thinwire {path}") | {"plan": "zero2"}
    assert len(rows) == 7
    assert rows == {name: of_options[name] for name in rows}
    shown = CliRunner().invoke(app, ["memory", "llama-7b", *CLUSTER, "--plan", path])
    assert "3 x 2,048 tokens a micro-batch, blocks recomputed" in " ".join(shown.output.split())


def test_a_recipe_brings_its_plan_and_its_sequence() -> None:
    document = run(str(ROOT / "recipes/pretrain/llama-7b.toml"), "--cluster", "a800-80g:16x8")
    assert "thinwire the recipe's" in by_plan(document)


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    assert run(str(tmp_path / "config.json"), *CLUSTER)["parameters"] < 1_000_000


@pytest.mark.parametrize("arguments", [("llama-8b", *CLUSTER), ("llama-7b", "--cluster", "abacus:1x1")])
def test_what_does_not_exist_is_refused(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["memory", *arguments])
    assert result.exit_code == 1
    assert "thinwire:" in result.stderr

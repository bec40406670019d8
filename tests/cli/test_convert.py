"""``thinwire convert``: the table, the files it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.spec import Plan
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4},
}


def run(*arguments: str, status: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["convert", *arguments])
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    place = tmp_path / "ds_config.json"
    place.write_text(json.dumps(CONFIG))
    return place


def test_it_writes_a_plan_and_a_recipe_that_names_it(config: Path, tmp_path: Path) -> None:
    plan, recipe = tmp_path / "plans/plan.toml", tmp_path / "recipe.toml"
    plan.parent.mkdir()
    output, _ = run(
        *(str(config), "--nodes", "2", "--nproc", "4", "--plan", str(plan), "--recipe", str(recipe)),
        *("--model", "llama-7b", "--steps", "5", "--seq", "128", "--set", "gradient_accumulation_steps=3"),
    )
    written = Plan.load(plan)
    assert (written.micro_batch, written.micro_batches, str(written.secondary)) == (2, 3, "4x1")
    read = Recipe.read(recipe)
    assert PlanTemplate.read(read).resolve(written.mesh) == written
    assert (read.train.steps, read.train.seq, read.model.preset) == (5, 128, "llama-7b")
    assert "wrote the plan" in output
    assert "wrote the recipe" in output
    for key in ("bf16.enabled", "zero_optimization.zero_hpz_partition_size"):
        assert key in output


def test_a_recipe_behind_a_link_finds_its_plan(config: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to("deep/er")
    plan, recipe = tmp_path / "plan.toml", tmp_path / "link" / "recipe.toml"
    arguments = ("--nproc", "4", "--recipe", str(recipe), "--model", "llama-7b", "--steps", "5")
    run(str(config), "--plan", str(plan), *arguments)
    written = Plan.load(plan)
    assert PlanTemplate.read(Recipe.read(recipe)).resolve(written.mesh) == written


def test_a_recipe_without_a_plan_file_holds_the_plan(config: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    run(str(config), "--nproc", "4", "--recipe", str(recipe), "--model", "llama-7b", "--steps", "5")
    read = Recipe.read(recipe)
    plan = PlanTemplate.read(read)
    assert plan.mesh is not None
    assert plan.resolve(plan.mesh).params == plan.mesh


def test_nothing_is_written_where_a_key_is_refused(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps({**CONFIG, "amp": {"enabled": True}}), encoding="utf-8")
    plan = tmp_path / "plan.toml"
    output, errors = run(str(config), "--nproc", "4", "--plan", str(plan), status=1)
    assert "refused" in output
    assert "amp" in errors
    assert "--drop KEY leaves a key out" in errors
    assert not plan.exists()
    run(str(config), "--nproc", "4", "--plan", str(plan), "--drop", "amp")
    assert plan.exists()


def test_json_has_a_row_for_each_key_and_the_plan(config: Path) -> None:
    output, _ = run(str(config), "--nproc", "4", "--json")
    result: dict[str, Any] = json.loads(output)
    rows = {row["key"]: row for row in result["rows"]}
    assert rows["zero_optimization.stage"]["action"] == "mapped"
    assert rows["gradient_accumulation_steps"]["action"] == "ignored"
    assert result["refused"] == 0
    assert Plan.parse(result["plan"]).params.ranks == 4


@pytest.mark.parametrize("set_", ["gradient_clipping=inf", "optimizer.params.betas=[nan, inf]", "amp=true"])
def test_json_is_one_valid_document(config: Path, set_: str) -> None:
    def no_number(text: str) -> None:
        raise AssertionError(text)

    refused = "betas" not in set_
    output, errors = run(str(config), "--nproc", "4", "--json", "--set", set_, status=int(refused))
    result: dict[str, Any] = json.loads(output, parse_constant=no_number)
    assert (result["refused"], result["plan"] is None) == (int(refused), refused)
    assert (f"{set_.partition('=')[0]} = " in errors) == refused


def test_json_is_an_error_alone_where_a_recipe_is_incomplete(config: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    output, _ = run(str(config), "--nproc", "4", "--json", "--recipe", str(recipe), status=1)
    assert "--model" in json.loads(output)["error"]


def test_fsdp2_s_call_and_a_file_of_its_arguments(tmp_path: Path) -> None:
    plan, other = tmp_path / "a.toml", tmp_path / "b.toml"
    run("--fsdp2", "fully_shard(model, reshard_after_forward=2)", "--nproc", "4", "--plan", str(plan))
    (tmp_path / "arguments.toml").write_text("reshard_after_forward = 2\n")
    run("--fsdp2", str(tmp_path / "arguments.toml"), "--nproc", "4", "--plan", str(other))
    assert plan.read_bytes() == other.read_bytes()
    assert str(Plan.load(plan).secondary) == "2x1"


def test_accelerate_s_yaml_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n"
    )
    output, _ = run(str(tmp_path / "accelerate.yaml"), "--nproc", "4")
    assert "P 4x1, G 4x1, OS 4x1" in output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"bf16": {}, "bf16": {}}', "bf16 is given more than once"),
        ("{bf16: 1}", "not valid JSON"),
        ("[1]", "expected a table of keys"),
        ("[" * 100_000, "not valid JSON"),
        ('{"bf16": ' + "[" * 900 + "]" * 900 + "}", "too many brackets"),
        ('{"bf16": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(config: Path, content: str, message: str) -> None:
    config.write_text(content, encoding="utf-8")
    assert message in run(str(config), status=1)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither given"),
        (["FILE", "--fsdp2", "fully_shard()"], "both given"),
        (["FILE", "--drop", "zero_optimization.staeg"], "zero_optimization.staeg is not in the configuration"),
        (["FILE", "--recipe", "r.toml"], "--model"),
        (["FILE", "--set", "bf16.enabled=2026-01-01"], 'bf16.enabled = "2026-01-01": expected true or false'),
    ],
)
def test_options_that_do_not_fit_are_refused(config: Path, arguments: list[str], message: str) -> None:
    given = [str(config) if argument == "FILE" else argument for argument in arguments]
    assert message in run(*given, status=1)[1]

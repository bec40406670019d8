"""Keys of files that have new names: both spellings are read, the new one is written, and the old one gets a hint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.spec import ClusterSpec, Plan, Wire
from thinwire.spec.io import apply_settings, read_toml
from thinwire.spec.plan_parts.islands import Islands
from thinwire.spec.recipe import Recipe
from thinwire.spec.renames import PLAN_KEYS

BASE = {"mesh": "2x2", "params": "1x1", "grads": "1x1", "optimizer": "2x1", "pp": 2}
VALUES: dict[str, Any] = {"schedule": "interleaved", "keep_gathered": "none", "backward_prefetch": "module"}
RENAMED = [
    *((old, new) for old, new in PLAN_KEYS.items() if old != "kept_unit"),
    *((old, PLAN_KEYS.get(new, new)) for old, new in Plan.former_keys.items()),
    ("wire.schedule", "wire.compress_until"),
]


def value_of(key: str) -> Any:
    return 0.5 if key == "wire.schedule" else VALUES.get(key, 3 << 20 if key == "live_bytes" else 2)


def spelled(key: str, value: Any) -> dict[str, Any]:
    return apply_settings(BASE, [f"{key}={value!r}"])


def field(plan: Plan, key: str) -> Any:
    return plan.wire.compress_until if key == "wire.schedule" else getattr(plan, Plan.former_keys.get(key, key))


CASES = [(old, new, value_of(old)) for old, new in RENAMED]


@pytest.mark.parametrize(("old", "new", "value"), CASES)
def test_both_spellings_are_the_same_plan_and_the_new_one_is_written(old: str, new: str, value: Any) -> None:
    plan = Plan.parse(spelled(new, value))
    assert field(plan, old) == value != field(Plan.parse(BASE), old)
    before = Plan.parse(spelled(old, value))
    assert (before, before.fingerprint()) == (plan, plan.fingerprint())
    for full in (False, True):
        text = plan.to_toml(full=full)
        assert Plan.from_toml(text) == plan
        assert Plan.old_spellings(read_toml(text, "it")) == {}
    assert spelled(new, value).keys() - BASE.keys() <= read_toml(plan.to_toml(), "it").keys()


@pytest.mark.parametrize(("old", "new", "value"), CASES)
def test_a_file_in_the_old_spelling_gets_one_hint(
    old: str, new: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n".join([*(f"{key} = {each!r}" for key, each in BASE.items()), f"{old} = {value!r}"])
    plan, recipe = tmp_path / "plan.toml", tmp_path / "recipe.toml"
    plan.write_text(text)
    recipe.write_text(
        f"[train]\nsteps = 1\n[model]\nlayers = 1\nhidden = 8\nheads = 1\n[plan]\npreset = 'zero1'\n{old} = {value!r}\n"
    )
    with caplog.at_level(logging.WARNING):
        Plan.load(plan)
        read = Recipe.read(recipe)
    assert [record.getMessage() for record in caplog.records] == [
        f"{plan}: {old} is now {new}; the old spelling is read until release 0.4",
        f"{recipe}: plan.{old} is now plan.{new}; the old spelling is read until release 0.4",
    ]
    caplog.clear()
    again = tmp_path / "again.toml"
    again.write_text(read.to_toml())
    assert Recipe.read(again) == read
    assert not caplog.records


def test_a_change_counts_over_a_file_in_either_spelling() -> None:
    plan = Plan.parse({**BASE, "bucket_bytes": 1, "tuning": {"bucket_bytes": 2}})
    assert plan.bucket_bytes == 2
    assert plan.with_(bucket_bytes=3).bucket_bytes == plan.with_(tuning={"bucket_bytes": 3}).bucket_bytes == 3
    assert plan.with_(wire={"compress_until": 0.5}).wire.compress_until == 0.5


def test_problems_name_the_keys_as_files_do() -> None:
    with pytest.raises(SpecError) as raised:
        Plan.parse({**BASE, "tuning": {"prefetch": -1, "prefetc": 1}, "wire": {"compress_until": 2}})
    assert [problem.split(" =")[0] for problem in raised.value.problems] == [
        "tuning.prefetc",
        "tuning.prefetch",
        "wire.compress_until",
    ]
    assert "did you mean tuning.prefetch?" in raised.value.problems[0]


def test_a_plan_file_says_what_differs_and_what_the_preset_means() -> None:
    plan = Plan.preset("zero1-node", nodes=2, local=4, bucket_bytes=1 << 20)
    assert plan.to_toml() == (
        "# preset zero1-node: OS inside a node, replicas across nodes (AMSP, 7B)\n"
        'name = "zero1-node"\n'
        "mesh = { local = 4, nodes = 2 }\n"
        "params = { local = 1, nodes = 1 }\n"
        "grads = { local = 1, nodes = 1 }\n"
        "optimizer = { local = 4, nodes = 1 }\n"
        "\n[tuning]\n"
        "bucket_bytes = 1048576\n"
    )


def test_older_plans_say_where_each_state_lives() -> None:
    plan = Plan.preset("zero1", nodes=2, local=2)
    stated = dict.fromkeys(("params", "grads", "optimizer"), "device")
    assert Plan.parse({**plan.to_file(full=True), "residence": stated}) == plan


def test_what_a_policy_fills_in_is_written_where_the_plan_says_otherwise() -> None:
    plan = Plan.preset("zero1", nodes=2, local=2, wire={"policy": "mzhybrid:8", "gather": "none"})
    assert Plan.from_toml(plan.to_toml()) == plan


def test_gains_of_error_feedback_were_keys_of_their_own() -> None:
    codec = {"reduce_inter": "int4:256"}
    assert Wire.parse({**codec, "error_feedback": True}).error_feedback == 0.1
    assert Wire.parse({**codec, "error_feedback": True, "feedback_gain": 1.0}).error_feedback == 1.0
    assert Wire.parse({"error_feedback": False, "feedback_gain": 0.1}) == Wire()
    assert Wire.parse({**codec, "error_feedback": True}).with_(feedback_gain=0.5).error_feedback == 0.5
    assert Islands.parse({"count": 2, "codec": "int4:256", "error_feedback": True}).error_feedback == 1.0
    with pytest.raises(SpecError, match="error_feedback"):
        Wire.parse({**codec, "error_feedback": 1.5})


def test_the_schedule_of_islands_was_a_list_of_tables() -> None:
    islands = Islands.parse({"count": 2, "schedule": [{"after": 0.5, "every": 64}]})
    assert islands == Islands(count=2, schedule=((0.5, 64),))
    assert [islands.every_at(share) for share in (0.0, 0.5)] == [32, 64]


def test_nodes_per_leaf_are_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = ClusterSpec.named("a800-80g:8x8", leaves=4)
    file = tmp_path / "cluster.toml"
    file.write_text(cluster.to_toml().replace("leaves = 4", "nodes_per_leaf = 4"))
    with caplog.at_level(logging.WARNING):
        assert ClusterSpec.load(file) == cluster
    assert "nodes_per_leaf is now leaves" in caplog.text
    assert cluster.with_(nodes_per_leaf=2).leaf_of_nodes == (0, 0, 1, 1, 2, 2, 3, 3)


def test_batch_and_recomputation_were_keys_of_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "[model]\nlayers = 1\nhidden = 8\nheads = 1\n[plan]\npreset = 'zero1'\n{plan}\n[train]\nsteps = 1\n{train}\n"
    file = tmp_path / "recipe.toml"
    file.write_text(text.format(plan="micro_batch = 2", train="micro_batch = 4\nrecompute = true"))
    with caplog.at_level(logging.WARNING):
        before = Recipe.read(file)
    assert "train.micro_batch is now plan.micro_batch, train.recompute is now plan.recompute" in caplog.text
    file.write_text(text.format(plan="micro_batch = 4\nrecompute = true", train=""))
    assert Recipe.read(file) == before
    caplog.clear()
    assert Recipe.read(file, ["train.micro_batch=8"]) == Recipe.read(file, ["plan.micro_batch=8"])
    assert "--set: train.micro_batch is now plan.micro_batch" in caplog.text
    for settings in (["train.micro_batch=2", "plan.micro_batch=8"], ["plan.micro_batch=8", "train.micro_batch=2"]):
        assert Recipe.read(file, settings).plan["micro_batch"] == 8
    assert Recipe.read(file, plan="preset:zero3").plan == {"preset": "zero3", "micro_batch": 4, "recompute": True}
    zero3 = ["plan=zero3", "plan.recompute=false"]
    assert Recipe.read(file, zero3).plan == {"preset": "zero3", "micro_batch": 4, "recompute": False}
    assert Recipe.read(file, ["plan={preset='zero3', micro_batch=9}"]).plan == {"preset": "zero3", "micro_batch": 9}

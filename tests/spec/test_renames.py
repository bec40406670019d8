"""Keys of files that have new names: both spellings are read, the new one is written, and the old one gets a hint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.spec import Plan
from thinwire.spec.io import apply_settings, read_toml
from thinwire.spec.recipe import Recipe
from thinwire.spec.renames import PLAN_KEYS, WIRE_KEYS

BASE = {"mesh": "2x2", "params": "1x1", "grads": "1x1", "optimizer": "2x1", "pp": 2}
VALUES: dict[str, Any] = {"schedule": "interleaved", "keep_gathered": "none", "backward_prefetch": "module"}
RENAMED = [*PLAN_KEYS.items(), *((f"wire.{old}", f"wire.{new}") for old, new in WIRE_KEYS.items())]


def value_of(key: str) -> Any:
    return 0.5 if key == "wire.schedule" else VALUES.get(key, 3 << 20 if key == "live_bytes" else 2)


def spelled(key: str, value: Any) -> dict[str, Any]:
    return apply_settings(BASE, [f"{key}={value!r}"])


def field(plan: Plan, key: str) -> Any:
    return plan.wire.schedule if key == "wire.schedule" else getattr(plan, key)


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
    assert plan.with_(wire={"compress_until": 0.5}).wire.schedule == 0.5


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

"""Recipe and plan of a run that continues on a different number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import Hardware, Started
from thinwire.train.launching.resolved import ResolvedRun, resolve_run


def recipe(**tables: Any) -> Recipe:
    train = {"steps": 5, "micro_batch": 4, "micro_batches": 1, **tables.pop("train", {})}
    cluster = {"device": "cpu", "elastic": True, **tables.pop("cluster", {})}
    model = {"layers": 4, "hidden": 16, "heads": 2}
    return Recipe.parse({"plan": "zero1", **tables, "model": model, "train": train, "cluster": cluster})


def torchrun(world: int, local: int) -> Started:
    return Started("torchrun", 0, world, 0, local)


def fit(wanted: Recipe, run: RunDirectory, ranks: Started) -> ResolvedRun:
    return resolve_run(wanted, run, ranks, Hardware(0, "float32"), resume=False, stream="none")


def turns(directory: Path, wanted: Recipe, *worlds: tuple[int, int]) -> list[ResolvedRun]:
    """The run on one set of ranks after the other."""
    run, continued = RunDirectory(directory), []
    for world, local in worlds:
        continued.append(fit(wanted, run, torchrun(world, local)))
        again = fit(wanted, run, torchrun(world, local))
        run.path.mkdir(exist_ok=True)
        continued[-1].recipe.save(run.recipe)
        continued[-1].plan.save(run.plan)
        # A rank that looks when rank 0 has written already finds the same.
        late = fit(wanted, run, torchrun(world, local))
        assert (late.recipe, late.plan) == (again.recipe, again.plan)
    return continued


def test_half_the_ranks_take_twice_the_micro_batches(tmp_path: Path) -> None:
    four, two, one = turns(tmp_path / "run", recipe(), (4, 2), (2, 2), (1, 1))
    assert [start.plan.global_batch for start in (four, two, one)] == [16, 16, 16]
    assert [start.plan.micro_batches for start in (four, two, one)] == [1, 2, 4]
    assert four.notes == ()
    assert two.notes[0].startswith("2 ranks instead of 4: zero1 on mesh 2x1: P 1x1, G 1x1, OS 2x1 (intra); ")
    assert two.notes[0].endswith("a step's 16 sequences are 2 micro-batches of 4 on each of 2 data-parallel ranks")


def test_a_batch_that_cannot_be_shared_grows_and_comes_back(tmp_path: Path) -> None:
    *_, three, four = turns(tmp_path / "run", recipe(), (4, 4), (3, 3), (4, 4))
    assert three.plan.global_batch == 18
    assert "a step takes 18 sequences instead of 16" in three.notes[1]
    assert four.plan.global_batch == 16
    assert len(four.notes) == 1


def test_a_run_that_began_otherwise_keeps_its_batch(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    recipe(cluster={"elastic": False}).save(run.recipe)
    Plan.preset("zero1", nodes=2, local=2, micro_batch=4).save(run.plan)
    assert fit(recipe(), run, torchrun(2, 2)).plan.global_batch == 16
    chosen = fit(recipe(train={"micro_batches": None, "global_batch": 8}), run, torchrun(2, 2))
    assert chosen.plan.global_batch == 8


def test_a_plan_of_one_mesh_and_counts_of_ranks_give_way(tmp_path: Path) -> None:
    plan = Plan.preset("zero1-node", nodes=2, local=2, compute_dtype="float32", wire={"reduce_inter": "int4:256"})
    plan.save(tmp_path / "plan.toml")
    wanted = recipe(plan=str(tmp_path / "plan.toml"), cluster={"nodes": 2, "nproc": 2})
    _, two = turns(tmp_path / "run", wanted, (4, 2), (2, 2))
    assert str(two.plan.mesh) == str(two.plan.optimizer) == "2x1"
    assert str(two.plan.wire.reduce_inter) == "int4:256"


def test_stages_stay_busy_or_the_ranks_are_refused(tmp_path: Path) -> None:
    wanted = recipe(plan={"preset": "zero1", "pp": 2}, train={"micro_batches": 2})
    _, two = turns(tmp_path / "run", wanted, (4, 2), (2, 2))
    assert (two.plan.world, two.plan.pp, two.plan.global_batch) == (1, 2, 16)
    with pytest.raises(SpecError, match="do not fit nodes = 1, nproc = 3"):
        fit(wanted, RunDirectory(tmp_path / "run"), torchrun(3, 3))

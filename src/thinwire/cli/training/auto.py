"""``thinwire train --plan auto``: measures the cluster briefly, lets the most promising plans make the run's first
steps, takes the fastest, and explains the choice."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.terminal.console import say
from thinwire.errors import UsageError
from thinwire.spec import Factor

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from thinwire.plan import Chosen, CodecLevel, Freedom, PricedPlan
    from thinwire.spec import ModelSpec, Plan
    from thinwire.spec.recipe import Recipe
    from thinwire.train.environment import Started
    from thinwire.train.launching.resolved import ResolvedRun
    from thinwire.train.processes.race import Race


def choose_plan(
    run: ResolvedRun, ranks: Started | None, profile: Path | None, codecs: CodecLevel | None, console: Console
) -> tuple[Plan, dict[str, Any]]:
    """Choose the plan for a run: by prediction, then by a race of those that the prediction cannot tell apart.

    The choice, the same on every rank, keeps the ranks of the run's plan, its sequences per step, and the keys that the
    search does not decide, such as dtypes. The console shows it and its reason. Ranks that a launcher has started all
    call this function; they are ``None`` if this process starts them. Without a profile of the cluster, one is measured
    now; without ``codecs``, none may be lossy, and the console says what such would gain.

    Returns:
        The plan, and what it rests on, by arguments of :meth:`RunDirectory.open`: the profile with the steps that the
        race has measured, the race (``None`` if the run is too short for one), and what the plan is expected to do.

    Raises:
        SpecError: The model's shape is unknown.
        UsageError: No plan fits; the message lists remedies.
    """
    import thinwire.plan as planner
    from thinwire.cli.measuring.ranks import status
    from thinwire.train.data.packing import prepare
    from thinwire.train.measuring.automatic import Here, measure_and_choose

    recipe, resolved = run.recipe, run.plan
    dataset = prepare(recipe.data)
    shape = recipe.model.shape(vocab=dataset.vocab, seq=recipe.train.seq)
    all_ranks = Factor(local=run.node_ranks, nodes=resolved.ranks // run.node_ranks)
    free = _freedom(recipe, codecs)
    with tempfile.TemporaryDirectory(prefix="thinwire-profile-") as directory:
        if profile is not None:
            source: Path | Here = profile
        elif ranks is not None:
            source = Here(all_ranks, _join(recipe, ranks), status(ranks))
        else:
            source = _measured_apart(recipe, resolved, all_ranks, shape, Path(directory))
        chosen, measured = measure_and_choose(
            shape, recipe.train.seq, resolved, source, "--plan auto", clip=True, free=free
        )
    _say(chosen, console)
    raced = _race(run, ranks, chosen, free, console)
    plan = chosen.plan if raced is None else raced.taken.plan
    consent = planner.lossy_codecs(chosen.job, chosen.searched, plan)
    say(console, *([] if consent is None else [consent]), *planner.replaced_keys(plan, resolved, recipe.plan))
    expected = planner.expectation(chosen.job, chosen.searched.simulations.price(chosen.job, plan))
    if raced is None:
        return plan, {"profile": measured, "race": None, "expected": expected}
    return plan, {"profile": raced.noted(measured), "race": raced.to_dict(), "expected": expected}


def _race(run: ResolvedRun, ranks: Started | None, chosen: Chosen, free: Freedom, console: Console) -> Race | None:
    """Let the finalists make the run's first steps, unless the run is short or there is but one."""
    import thinwire.plan as planner
    from thinwire.train.processes.race import announcement, lap_here, race, time_limit

    limit = time_limit(run.recipe.train.steps, chosen.predicted.seconds)
    if limit is None:
        say(console, "auto: no race, as the run itself is predicted to be over sooner")
        return None
    entered = planner.finalists(chosen, run.plan, free)
    if len(entered) == 1:
        return None
    say(console, announcement(entered, limit))
    done = race(entered, lap_here(run), limit) if ranks is None else _race_beside(run, ranks, entered, limit)
    say(console, *done.lines())
    return done


def _race_beside(run: ResolvedRun, ranks: Started, entered: tuple[PricedPlan, ...], limit: float) -> Race:
    """A race of ranks that a launcher has started."""
    from thinwire.collectives import group
    from thinwire.train.processes.beside import LapsBeside
    from thinwire.train.processes.race import race

    _join(run.recipe, ranks)
    with LapsBeside(run, group.control()) as laps:
        return race(entered, laps.lap, limit, clock=laps.clock, prepare=laps.prepare)


def _freedom(recipe: Recipe, codecs: CodecLevel | None) -> Freedom:
    """What the search may choose: all but what the recipe decides beside its plan's name.

    Its ``micro_batch`` and ``micro_batches`` say how many sequences a rank trains in a step, and the search divides
    them; beside ``global_batch``, ``micro_batch`` is an upper limit.
    """
    from thinwire.plan import Freedom

    decided = {} if "mesh" in recipe.plan else recipe.plan  # a whole plan has every key
    return Freedom(
        largest_micro_batch=None if recipe.train.global_batch is None else decided.get("micro_batch"),
        recompute=decided.get("recompute"),
        cuts=recipe.model.kind != "huggingface",
        codecs=codecs or "lossless",
    )


def _join(recipe: Recipe, ranks: Started) -> torch.device:
    """Join the other ranks, unless this one has; returns its device."""
    from thinwire.collectives import group
    from thinwire.train.environment import join, rank_device

    device = rank_device(recipe.cluster.device, ranks.local_rank)
    if not group.is_initialized():
        join(device, recipe.cluster.timeout, recipe.cluster.keys)
    return device


def _measured_apart(recipe: Recipe, resolved: Plan, mesh: Factor, shape: ModelSpec, directory: Path) -> Path:
    """The file of a profile that ranks make which are started for it."""
    from thinwire.train.measuring.automatic import BUDGET

    model, out = directory / "model.toml", directory / "profile.json"
    shape.save(model)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mesh.ranks),
        "-m", "thinwire.cli.main", "profile", "--out", str(out), "--budget", f"{BUDGET:.0f}s", "--model", str(model),
        "--seq", str(recipe.train.seq), "--micro-batch", str(resolved.micro_batch), "--dtype", resolved.compute_dtype,
        "--nodes", str(mesh.nodes), "--device", recipe.cluster.device,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode or not out.exists():
        raise UsageError(f"--plan auto could not measure this machine:\n{result.stderr.strip()[-2000:]}")
    return out


def _say(choice: Chosen, console: Console) -> None:
    """Print the plan, what bounds its step, and the fastest classic system."""
    import thinwire.plan as planner

    chosen = choice.predicted
    lines = [
        f"auto: {planner.summary(chosen.plan)}",
        f"predicted step {chosen.seconds:.3f} s, bound by {planner.binding(choice.job, chosen)}",
    ]
    plain = min((c for c in choice.searched.classics if c.fits), key=lambda c: c.seconds, default=None)
    if plain is not None:
        lines.append(
            f"of the classic systems {plain.label} would be fastest: {plain.seconds:.3f} s, "
            f"{plain.seconds / chosen.seconds:.2f} times as long"
        )
    say(console, *lines)

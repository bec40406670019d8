"""``thinwire train --plan auto``: measures the cluster briefly, chooses a plan, and explains the choice."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.plan import Searched, TrainingJob
    from thinwire.spec import ModelSpec, Plan
    from thinwire.spec.profile import Profile
    from thinwire.spec.recipe import Recipe
    from thinwire.train.environment import Started

__all__ = ["choose_plan"]

BUDGET = 20.0
"""Duration of the measurement in seconds."""


def choose_plan(
    recipe: Recipe, resolved: Plan, ranks: Started | None, profile: Path | None, console: Console
) -> tuple[Plan, Profile]:
    """Choose the plan for a run.

    Args:
        recipe: Recipe of the run.
        resolved: Plan of the recipe; the choice keeps its mesh, order of ranks, dtype and batch.
        ranks: The ranks that a launcher has started, all of which call this function; ``None`` if this process starts
            them.
        profile: Profile of the cluster; ``None`` measures one now.
        console: Console that shows the choice and its reason.

    Returns:
        The chosen plan, the same on every rank, and the profile that the choice is based on.

    Raises:
        SpecError: The model's shape is unknown.
        UsageError: No plan fits; the message lists remedies.
    """
    import thinwire.plan as planner
    from thinwire.spec.profile import Profile
    from thinwire.train.data.packing import prepare

    dataset = prepare(recipe.data)
    shape = recipe.model.shape(vocab=dataset.vocab, seq=recipe.train.seq)
    measured = Profile.read(profile) if profile else _measured(recipe, resolved, shape, ranks)
    clip = recipe.optimizer.clip is not None
    job = planner.profiled_job(shape, recipe.train.seq, resolved, measured, clip=clip)
    searched = planner.search_fitting(job, "--plan auto")
    _say(job, searched, console)
    chosen = searched.candidates[0].plan
    kept = {"compute_dtype": resolved.compute_dtype, "placement": resolved.placement, "topology": resolved.topology}
    return chosen.with_(name="auto", **kept), measured


def _measured(recipe: Recipe, resolved: Plan, shape: ModelSpec, ranks: Started | None) -> Profile:
    """A profile made now: by this rank and the others, or by ranks that are started for it."""
    from thinwire.spec.profile import Profile

    with tempfile.TemporaryDirectory(prefix="thinwire-profile-") as directory:
        out = Path(directory) / "profile.json"
        if ranks is None:
            _measure_apart(recipe, resolved, shape, Path(directory), out)
            return Profile.read(out)
        from thinwire.cli.profile import Measurement, measure_here
        from thinwire.train.environment import rank_device
        from thinwire.train.observing.pieces import pieces
        from thinwire.train.observing.room import rank_memory

        device = rank_device(recipe.cluster.device, ranks.local_rank)
        parts = pieces(
            shape,
            resolved.mesh,
            seq=recipe.train.seq,
            micro_batch=resolved.micro_batch,
            dtype=resolved.compute_dtype,
            memory=rank_memory(device),
        )
        measurement = Measurement(out, BUDGET, parts, resolved.mesh, device, timeout=recipe.cluster.timeout)
        return measure_here(measurement, ranks)


def _measure_apart(recipe: Recipe, resolved: Plan, shape: ModelSpec, directory: Path, out: Path) -> None:
    from thinwire.errors import UsageError

    model = directory / "model.toml"
    shape.save(model)
    mesh = resolved.mesh
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mesh.ranks),
        "-m", "thinwire.cli.main", "profile", "--out", str(out), "--budget", f"{BUDGET:.0f}s", "--model", str(model),
        "--seq", str(recipe.train.seq), "--micro-batch", str(resolved.micro_batch), "--dtype", resolved.compute_dtype,
        "--nodes", str(mesh.nodes), "--device", recipe.cluster.device,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode or not out.exists():
        raise UsageError(f"--plan auto could not measure this machine:\n{result.stderr.strip()[-2000:]}")


def _say(job: TrainingJob, searched: Searched, console: Console) -> None:
    import thinwire.plan as planner

    chosen = searched.candidates[0]
    console.print(f"auto: {planner.summary(chosen.plan)}", markup=False, soft_wrap=True)
    console.print(
        f"predicted step {chosen.seconds:.3f} s, bound by {planner.binding(job, chosen)}", markup=False, soft_wrap=True
    )
    plain = min((c for c in searched.classics if c.fits), key=lambda c: c.seconds, default=None)
    if plain is not None:
        console.print(
            f"of the classic systems {plain.label} would be fastest: {plain.seconds:.3f} s, "
            f"{plain.seconds / chosen.seconds:.2f} times as long",
            markup=False,
            soft_wrap=True,
        )

"""Plans for frameworks that describe a job by its ranks and a precision."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.errors import SpecError
from thinwire.spec import Factor, Plan


def launched_mesh(world: int) -> Factor:
    """The mesh of a job that torchrun, or a launcher with its variables, has started.

    Args:
        world: Number of ranks.
    """
    world = max(world, 1)
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    return Factor(local=local, nodes=world // local)


def chosen_plan(
    plan: Plan | str | Path,
    mesh: Factor,
    compute_dtype: str | None,
    *,
    asked_by: str | None = None,
) -> Plan:
    """The plan of a job.

    Args:
        plan: A plan, the name of a preset or a plan file (``.toml``).
        mesh: Mesh of a preset.
        compute_dtype: The ``compute_dtype`` that the framework's precision asks for; ``None`` without one: presets then
            compute in float32, and other plans in their own.
        asked_by: What asks for it, for messages; ``None`` for a mixed precision that can be left out.

    Raises:
        SpecError: There is no such preset or file, or the plan computes in another dtype than the framework.
    """
    if not isinstance(plan, Plan) and not str(plan).endswith(".toml"):
        return Plan.preset(str(plan), nodes=mesh.nodes, local=mesh.local, compute_dtype=compute_dtype or "float32")
    chosen = plan if isinstance(plan, Plan) else Plan.load(plan)
    if compute_dtype not in (None, chosen.compute_dtype):
        remedy = "change one of them" + ("" if asked_by else ", or leave the mixed precision out")
        raise SpecError(
            f"plan {chosen.name}",
            f'compute_dtype = "{chosen.compute_dtype}", but {asked_by or "the mixed precision of the loop"} asks for '
            f'"{compute_dtype}": {remedy}',
        )
    return chosen

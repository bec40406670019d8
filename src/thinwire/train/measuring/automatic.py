"""``auto`` in place of a plan: measure the cluster, then choose the plan."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

import thinwire.plan as planner
from thinwire.collectives import group
from thinwire.plan import Chosen, Freedom
from thinwire.profile import Settings, measure
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.spec.profile import Profile
from thinwire.train.measuring.pieces import pieces, weightless
from thinwire.train.measuring.room import rank_memory

BUDGET: Final = 20.0
"""Duration of the measurement in seconds."""


@dataclass(frozen=True)
class Here:
    """The ranks of this job, which measure the cluster together. While they do, ``status`` gives a function that says
    what they are at."""

    mesh: Factor
    device: torch.device
    status: AbstractContextManager[Callable[[str], None]]


def measure_and_choose(
    shape: ModelSpec, seq: int, template: Plan, source: Path | Here, asked: str, *, clip: bool, free: Freedom
) -> tuple[Chosen, Profile]:
    """Choose a plan by a profile, or by what the ranks measure now. Collective if they measure.

    The source is the file of a profile of the cluster, or the ranks that measure one in :data:`BUDGET` seconds; they
    are in the job's group, or join it. The choice, the same on every rank, keeps the ranks, batch and dtype of a
    template, and is free otherwise. Messages name the option that has asked for it. Returns it with the profile.

    Raises:
        SpecError: The profile cannot be read.
        UsageError: No plan fits, or the template has what no plan of the search has.
    """
    measured = Profile.read(source) if isinstance(source, Path) else _measured(shape, seq, template, source)
    job = planner.profiled_job(shape, seq, template, measured, clip=clip, free=free)
    return planner.choose(job, template, asked, free=free), measured


def _measured(shape: ModelSpec, seq: int, template: Plan, here: Here) -> Profile:
    if not group.is_initialized():
        group.init(device=here.device)
    memory = rank_memory(here.device)
    batch, dtype = template.micro_batch, template.compute_dtype
    parts = pieces(shape, here.mesh, seq=seq, micro_batch=batch, dtype=dtype, memory=memory)
    settings = Settings(here.mesh, here.device, BUDGET, parts, memory, weightless=weightless)
    with tempfile.TemporaryDirectory(prefix="thinwire-profile-") as directory, here.status as say:
        return measure(settings, group.control(), Path(directory) / "profile.json", say)

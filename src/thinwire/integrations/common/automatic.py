"""``plan="auto"`` in the loop of a framework: measures the cluster, lets the most promising plans make some steps, and
takes the fastest, as ``thinwire train`` does."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

import thinwire.plan as planner
from thinwire.agreement import NOTHING, Typed
from thinwire.collectives import group
from thinwire.errors import UsageError
from thinwire.integrations.common.plans import chosen_plan
from thinwire.plan import CODEC_LEVELS, CodecLevel
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.spec.models.huggingface import huggingface_shape
from thinwire.spec.recipe import Recipe
from thinwire.train.data.tokens import TokenWriter
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.measuring.automatic import Here, measure_and_choose
from thinwire.train.processes.beside import LapsBeside
from thinwire.train.processes.race import SHORTEST, announcement, race, time_limit

log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class AutoPlan:
    """Stands for the plan that thinwire chooses when it shards a module, as ``plan="auto"`` does in the ``Trainer`` of
    transformers. The module is, or contains, a model of transformers.

    Attributes:
        sequence_length: Tokens in a sequence.
        micro_batch: Sequences in a micro-batch of one rank.
        profile: A profile of the cluster (``.json``); ``None`` measures one, in some 20 seconds.
        codecs: How lossy codecs may be: ``"none"``, ``"lossless"``, ``"standard"`` or ``"aggressive"``.

    Raises:
        UsageError: A value is not valid.
    """

    sequence_length: int
    micro_batch: int
    profile: str | Path | None = None
    codecs: CodecLevel = "lossless"

    def __post_init__(self) -> None:
        for name in ("sequence_length", "micro_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: a positive number is needed")
        if self.codecs not in CODEC_LEVELS:
            raise UsageError(f"codecs={self.codecs!r}: valid are {', '.join(CODEC_LEVELS)}")


def plan_for(
    module: nn.Module,
    plan: Plan | AutoPlan | str | Path,
    mesh: Factor,
    compute_dtype: str | None,
    device: torch.device,
    *,
    micro_batches: int = 1,
    clip: bool = True,
    steps: int | None = None,
) -> Plan:
    """The plan by which a loop shards a module. Collective for an :class:`AutoPlan`.

    Args:
        module: The module.
        plan: What the user has named.
        mesh: All ranks.
        compute_dtype: See :func:`~thinwire.integrations.common.plans.chosen_plan`.
        device: Device of this rank.
        micro_batches: Micro-batches of a step, for an :class:`AutoPlan`, as the others.
        clip: Whether gradients are clipped by their norm.
        steps: Steps of the training; ``None`` if the loop does not know.

    Raises:
        SpecError: There is no such plan, or the planner does not know models of this kind.
        UsageError: The module contains no model of transformers, or no plan fits.
    """
    if plan == "auto":
        raise UsageError(
            'plan="auto": memory and time depend on the length of sequences, which this loop does not say; give '
            "AutoPlan(sequence_length=..., micro_batch=...), which is beside this class"
        )
    if not isinstance(plan, AutoPlan):
        return chosen_plan(plan, mesh, compute_dtype)
    model = _described(module)
    template = chosen_plan("zero3", mesh, compute_dtype).with_(
        micro_batch=plan.micro_batch,
        micro_batches=micro_batches,
        recompute=bool(getattr(model, "is_gradient_checkpointing", False)),
    )
    return automatic_plan(model, plan, template, device, clip=clip, steps=steps)


def _described(module: nn.Module) -> Any:
    """The model of transformers that is most of a module.

    Raises:
        UsageError: There is none.
    """
    sizes = {
        part: sum(parameter.numel() for parameter in part.parameters())
        for part in module.modules()
        if hasattr(getattr(part, "config", None), "to_dict")
    }
    largest = max(sizes, key=lambda part: sizes[part], default=None)  # of equal ones, the outermost
    if largest is None or 2 * sizes[largest] < sum(parameter.numel() for parameter in module.parameters()):
        raise UsageError(
            f"AutoPlan: {type(module).__name__} is no model of transformers, and none is the larger part of it, so "
            "the planner does not know its shapes; name a preset, or make a plan with `thinwire plan`"
        )
    return largest


def automatic_plan(
    model: Any, auto: AutoPlan, template: Plan, device: torch.device, *, clip: bool, steps: int | None
) -> Plan:
    """Choose a plan for a model of Hugging Face. Collective.

    The loop decides micro-batch, recomputation, and that ranks are data-parallel; a line of the log says so. Plans are
    tried in processes beside the loop, on a model of the same configuration with random weights and tokens: nothing of
    the loop is touched.

    Args:
        model: The model.
        auto: What the user has said.
        template: A plan with the job's mesh, batch, dtype and recomputation, by which the choice is made.
        device: Device of this rank.
        clip: Whether gradients are clipped by their norm.
        steps: Steps of the training; ``None`` if the loop does not know.

    Returns:
        The plan, the same on every rank; it does not recompute, as the model itself does.

    Raises:
        SpecError: The configuration does not describe a shape that the planner knows.
        UsageError: No plan fits.
    """
    config, seq = model.config.to_dict(), auto.sequence_length
    shape = ModelSpec.parse({**huggingface_shape(config), "seq": seq}, "model.config")
    source = Here(template.mesh, device, nullcontext(log.debug)) if auto.profile is None else Path(auto.profile)
    free = planner.Freedom(micro_batch=template.micro_batch, recompute=template.recompute, codecs=auto.codecs)
    chosen, _ = measure_and_choose(shape, seq, template, source, 'plan="auto"', clip=clip, free=free)
    log.info("auto: %s; predicted step %.3f s", planner.summary(chosen.plan), chosen.predicted.seconds)
    log.info(
        "auto: the loop decides micro-batch and recomputation, and tp and pp stay 1, as it cannot take another choice "
        "of them"
    )
    plan = _raced(config, shape, template, chosen, free, device, clip=clip, steps=steps)
    consent = planner.lossy_codecs(chosen.job, chosen.searched, plan)
    if consent is not None:
        log.info("auto: %s", consent.replace("--codecs ", "codecs="))
    return plan.with_(recompute=False)


def _raced(
    config: Mapping[str, Any],
    shape: ModelSpec,
    template: Plan,
    chosen: planner.Chosen,
    free: planner.Freedom,
    device: torch.device,
    *,
    clip: bool,
    steps: int | None,
) -> Plan:
    """The fastest of the plans that the prediction cannot tell apart, and of the presets; the same on every rank."""
    limit = SHORTEST if steps is None else time_limit(steps, chosen.predicted.seconds)
    entered = planner.finalists(chosen, template, free)
    if limit is None or len(entered) == 1:
        return chosen.plan
    log.info(announcement(entered, limit))
    if not group.is_initialized():
        group.init(device=device)
    ranks = group.control()
    with tempfile.TemporaryDirectory(prefix="thinwire-race-") as own:
        # All ranks name one path; each host has the file of its first rank.
        place = ranks.all_gather_typed(f"{own}-tokens", Typed[str](str))[0]
        try:
            ranks.agree(lambda: _write_tokens(Path(place), shape), _unwritten, NOTHING)
            recipe = _recipe(config, shape, Path(place), chosen.plan, device, clip=clip)
            run = ResolvedRun(recipe, chosen.plan, RunDirectory(Path(own)), template.mesh.local)
            with LapsBeside(run, ranks) as laps:
                done = race(entered, laps.lap, limit, clock=laps.clock, prepare=laps.prepare)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    for line in done.lines():
        log.info(line)
    return done.taken.plan


_TOKENS: Final = 64
"""Sequences of random tokens that laps train on, again and again."""


def _write_tokens(place: Path, shape: ModelSpec) -> None:
    """Write random tokens, on the first rank of each host."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        return
    place.mkdir()
    drawn = np.random.default_rng(0).integers(shape.vocab, size=_TOKENS * (shape.seq + 1))
    with TokenWriter(place / "tokens.bin", shape.vocab) as writer:
        writer.append(drawn)


def _unwritten(problems: Mapping[int, str]) -> UsageError:
    rank, why = next(iter(problems.items()))
    return UsageError(f'plan="auto": rank {rank} cannot write tokens to try plans on: {why}; set TMPDIR')


def _recipe(
    config: Mapping[str, Any], shape: ModelSpec, tokens: Path, plan: Plan, device: torch.device, *, clip: bool
) -> Recipe:
    """A run of the model's configuration on random tokens."""
    path, plain = [str(tokens / "tokens.bin")], json.loads(json.dumps(dict(config), default=str))
    table = {
        "plan": plan.to_dict(),
        "model": {"kind": "huggingface", "config": plain},
        "data": {"source": "tokens", "paths": path, "validation_paths": path},
        "train": {"steps": 1, "seq": shape.seq},
        "optimizer": {"clip": 1.0 if clip else 0.0},
        "cluster": {"device": device.type},
    }
    return Recipe.parse(table, 'plan="auto"')

"""``plan="auto"`` in the loop of a framework: measures the cluster and chooses a plan, as ``thinwire train`` does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import thinwire.plan as planner
from thinwire.errors import UsageError
from thinwire.plan import CodecLevel
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.models.huggingface import huggingface_shape
from thinwire.train.measuring.automatic import Here, measure_and_choose

__all__ = ["automatic_plan"]

log = logging.getLogger("thinwire")


def automatic_plan(
    config: Mapping[str, Any],
    seq: int | None,
    template: Plan,
    device: torch.device,
    profile: str | None,
    *,
    clip: bool,
    codecs: CodecLevel = "lossless",
) -> Plan:
    """Choose a plan for a model of Hugging Face. Collective.

    The loop decides micro-batch, recomputation, and that ranks are data-parallel; a line of the log says so.

    Args:
        config: Configuration of the model.
        seq: Number of tokens in a sequence; ``None`` if it is not known.
        template: A plan with the job's mesh, batch, dtype and recomputation, which the choice keeps.
        device: Device of this rank.
        profile: A profile of the cluster; ``None`` measures one now, in some 20 seconds.
        clip: Whether gradients are clipped by their norm.
        codecs: How lossy codecs may be.

    Returns:
        The plan, the same on every rank.

    Raises:
        SpecError: The configuration does not describe a shape that the planner knows.
        UsageError: The length of sequences is unknown, or no plan fits.
    """
    if seq is None:
        raise UsageError(
            'plan="auto": the length of sequences is unknown, on which memory and time depend; set '
            "ThinwireArguments(sequence_length=...), or max_length of TRL's configurations"
        )
    shape = ModelSpec.parse({**huggingface_shape(config), "seq": seq}, "model.config")
    source = Here(template.mesh, device, nullcontext(log.debug)) if profile is None else Path(profile)
    free = planner.Freedom(micro_batch=template.micro_batch, recompute=template.recompute, codecs=codecs)
    chosen, _ = measure_and_choose(shape, seq, template, source, 'plan="auto"', clip=clip, free=free)
    log.info("auto: %s; predicted step %.3f s", planner.summary(chosen.plan), chosen.predicted.seconds)
    log.info(
        "auto: the trainer's own arguments decide micro-batch and recomputation, and tp and pp stay 1, as the trainer "
        "cannot take another choice of them"
    )
    if chosen.consent is not None:
        log.info("auto: %s", chosen.consent.replace("--codecs ", "codecs="))
    return chosen.plan

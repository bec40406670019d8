"""A study as a part of a page."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.report import markdown_table
from thinwire_bench.study.arms import LossStudy
from thinwire_bench.study.curves import Curve
from thinwire_bench.study.outcome import ArmOutcome, missing_note, sheets


def markdown(study: LossStudy, curves: Sequence[Curve], arm_outcomes: Sequence[ArmOutcome]) -> str:
    """The answer as Markdown, with what a reader needs to judge it.

    Args:
        study: The study.
        curves: Curves of its finished runs.
        arm_outcomes: The outcome of each arm.

    Returns:
        Markdown.
    """
    versions = sorted({f"torch {curve.versions['torch']}, thinwire {curve.versions['thinwire']}" for curve in curves})
    lines = [
        f"{len(study.spec.arms)} arms, {len(study.spec.seeds)} seeds, {study.spec.tokens:,} tokens a run in "
        f"{study.runs[0].steps} steps; {'; '.join(versions)}.",
        "",
    ]
    if note := missing_note(arm_outcomes):
        lines += [f"**{note}.**", ""]
    for sheet in sheets(study.spec, arm_outcomes):
        lines += markdown_table(sheet)
    return "\n".join(lines)

"""``thinwire plan --compare``: compares a run with its prediction."""

from __future__ import annotations

import json
from pathlib import Path

from thinwire.cli.terminal.console import wide_console


def compare_run(run: Path, profile: Path | None, refit: Path | None, *, as_json: bool) -> None:
    """Show a run and its prediction, and write a profile that is fitted to the run if ``refit`` names a file."""
    import thinwire.plan as planner
    from thinwire.errors import UsageError
    from thinwire.report import Sheet, rich_table
    from thinwire.spec.profile import Profile
    from thinwire.units import format_bytes, format_duration

    if profile is None:
        profile = run / "profile.json"
        if not profile.is_file():
            raise UsageError("--compare needs the --profile of the cluster on which the run was made")
    measured = Profile.read(profile)
    comparison = planner.compare(run, measured)
    shown = {"s": format_duration, "B": format_bytes}
    rows = [
        [q.name, shown[q.unit](q.predicted), shown[q.unit](q.measured), "-" if q.error is None else f"{q.error:+.1%}"]
        for q in comparison.quantities
    ]
    console = wide_console(as_json=as_json)
    title = f"Predicted and measured, median of {comparison.steps} steps"
    console.print(rich_table(Sheet(title, ["", "predicted", "measured", "error"], 1, rows)))
    if refit is not None:
        fitted = planner.refit(run, measured)
        fitted.profile.write(refit)
        changes = ", ".join(f"{name} x {factor:.2f}" for name, factor in fitted.factors.items())
        console.print(f"wrote a profile that fits the run to {refit}: {changes}", markup=False, soft_wrap=True)
    if as_json:
        quantities = [
            {"name": q.name, "unit": q.unit, "predicted": q.predicted, "measured": q.measured}
            for q in comparison.quantities
        ]
        print(json.dumps({"steps": comparison.steps, "quantities": quantities}))

"""``thinwire plan --compare``: compares a run with its prediction."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from thinwire.cli.terminal.console import say, wide_console
from thinwire.errors import UsageError
from thinwire.report import print_sheet
from thinwire.report.sheet import prediction_sheet


def compare_run(run: Path, profile: Path | None, refit: Path | None, *, as_json: bool) -> None:
    """Show a run and its prediction, and write a profile that is fitted to the run if ``refit`` names a file."""
    import thinwire.plan as planner
    from thinwire.spec.profile import Profile

    if profile is None:
        profile = run / "profile.json"
        if not profile.is_file():
            raise UsageError("--compare needs the --profile of the cluster on which the run was made")
    measured = Profile.read(profile)
    comparison = planner.compare(run, measured)
    console = wide_console(as_json=as_json)
    title = f"Predicted and measured, {comparison.of_what}"
    print_sheet(console, prediction_sheet(comparison, title))
    if refit is not None:
        fitted = planner.refit(run, measured)
        fitted.profile.write(refit)
        changes = ", ".join(f"{name} x {factor:.2f}" for name, factor in fitted.factors.items())
        changes = changes or "no other computation, transfers or codecs fit it better"
        say(console, f"wrote a profile that fits the run to {refit}: {changes}")
    if as_json:
        print(json.dumps({"steps": comparison.steps, "quantities": list(map(asdict, comparison.quantities))}))

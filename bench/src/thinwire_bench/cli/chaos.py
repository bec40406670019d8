"""``thinwire bench chaos``: runs that are killed, stopped, cut off, filled up and damaged, and what becomes of them."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import SpecError, ThinwireError
from thinwire_bench.cli.shared import Page, insert_into, markdown, progress, show, words

if TYPE_CHECKING:
    from thinwire_bench.chaos.trial import TrialVerdict


_RUNS: Final = Path("runs/chaos")


@dataclass(frozen=True)
class ChaosOptions:
    """The options of ``thinwire bench chaos``."""

    minutes: Annotated[float, typer.Option(min=0, help="No run begins after that; the same command continues.")] = 30.0
    seed: Annotated[int, typer.Option(min=0, help="Decides what happens to which run, and when.")] = 0
    runs: Annotated[
        str, typer.Option(metavar="all|NAME,...", help="Which runs: presets, codecs and schedules by name.")
    ] = "all"
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until a collective gives up.")] = 20.0
    patience: Annotated[float, typer.Option(min=1, help="Seconds that a start may take beside other work.")] = 120.0
    log: Annotated[Path, typer.Option(metavar="LOG.jsonl", help="Where verdicts go.")] = Path("runs/chaos.jsonl")
    read: Annotated[bool, typer.Option("--read", help="Train nothing: read the log.")] = False
    page: Page = None


@expand_options
def chaos(options: ChaosOptions) -> None:
    """Disturb small runs of every preset, codec, schedule and source, and compare them with undisturbed ones.

    As root, runs write to a small file system of their own, which fills up and loses power, and links of a lab are cut.
    What has not happened yet comes first.

    [bold]Examples[/bold]

      thinwire bench chaos --minutes 30

      thinwire bench chaos --read --log docs/results/chaos.jsonl --page docs/results/faults.md
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # file systems are unmounted, and ranks ended
    with explained():
        from thinwire_bench.chaos.campaign import read_log
        from thinwire_bench.chaos.sheets import campaign_sheets, faultless

        verdicts = read_log(options.log, options.seed) if options.read else _conducted(options)
        sheets = campaign_sheets(verdicts)
        show(sheets)
        for verdict in verdicts:
            for incident in verdict.incidents:
                for kind, text in incident.faults:
                    progress(f"{verdict.trial}: {incident.kind}: {kind}: {text}")
            if not verdict.equal:
                progress(f"{verdict.trial}: unequal: {verdict.about}")
        insert_into(options.page, markdown(sheets), "thinwire bench chaos --page")
    raise typer.Exit(0 if faultless(verdicts) else 1)


def _conducted(options: ChaosOptions) -> list[TrialVerdict]:
    from thinwire_bench.chaos.campaign import campaign, make_trials
    from thinwire_bench.chaos.disk import can_mount
    from thinwire_bench.chaos.trial import CampaignSettings

    mounts, cables = can_mount(), _has_lab()
    if not mounts:
        progress("disks do not fill up and lose no power: that takes root, loop devices and mkfs.ext4")
    if not cables:
        progress("no link is cut: this user cannot make a lab (see thinwire doctor)")
    chosen = _chosen(options.runs)
    settings = CampaignSettings(_RUNS.resolve(), options.timeout, options.patience, mounts)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    return campaign(
        lambda turn: make_trials(options.seed, mounts=mounts, cables=cables, chosen=chosen, turn=turn),
        settings,
        options.log,
        seed=options.seed,
        minutes=options.minutes,
        report=progress,
    )


def _chosen(names: str) -> list[str] | None:
    """The runs of the option.

    Raises:
        SpecError: There is no such run.
    """
    from thinwire_bench.chaos.setups import setups

    known = [setup.name for setup in setups()]
    wanted = words(names)
    if wanted == ["all"]:
        return None
    if not wanted or any(name not in known for name in wanted):
        raise SpecError("--runs", f"{names!r}: valid are all, or some of {', '.join(known)}")
    return wanted


def _has_lab() -> bool:
    from thinwire.lab import Lab, LabSpec

    try:
        with Lab(LabSpec(nodes=1, ranks=1, bandwidth=None)):
            return True
    except ThinwireError:
        return False

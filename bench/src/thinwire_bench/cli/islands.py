"""``thinwire bench islands``: what training in islands costs in loss, and what it saves in time and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import (
    Hosts,
    Page,
    Ranks,
    Steps,
    Timeout,
    checked_model,
    insert_into,
    markdown,
    measured,
    progress,
    settings_of,
    show,
    words,
    write_results,
)

if TYPE_CHECKING:
    from thinwire.report import Sheet
    from thinwire.spec.factor import Factor
    from thinwire_bench.peers.interface import SystemSpec
    from thinwire_bench.study.arms import LossStudy
    from thinwire_bench.study.curves import Curve, Curves
    from thinwire_bench.study.islands import ArmTime, Reached
    from thinwire_bench.systems.rows import SystemRow

_PARTS: Final = ("loss", "times", "steps")

RESULTS = Path("docs/results/islands")
"""Directory of the documentation's study."""


@dataclass(frozen=True)
class IslandsOptions:
    """The options of ``thinwire bench islands``."""

    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="File that says what to compare.")] = Path(
        "recipes/islands/study.toml"
    )
    parts: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="What to make, if it is missing: loss (runs of the study), times (steps of its arms in the lab), "
            "steps (steps of presets and peers).",
        ),
    ] = "loss,times,steps"
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory of everything measured; by default docs/results/islands.", show_default=False
        ),
    ] = None
    work: Annotated[Path, typer.Option(metavar="DIR", help="Directory for checkpoints and logs of the runs.")] = Path(
        "runs/islands"
    )
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per run, instead of the study's.", show_default=False)
    ] = None
    seeds: Annotated[
        str | None, typer.Option(metavar="N,...", help="Seeds, instead of the study's.", show_default=False)
    ] = None
    arms: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Some of the study's arms.", show_default=False)
    ] = None
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE|none,...", help="Bandwidth of each host's link in each direction.")
    ] = "50mbit,200mbit,1gbit"
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each system runs once on each link in every round.")] = 5
    steps: Steps = 3
    model: Annotated[str, typer.Option(help="Model of the steps of presets and peers.")] = "llama-17m"
    seq: Annotated[int, typer.Option("--seq", min=1, help="Tokens per step of each rank, for presets and peers.")] = 128
    nodes: Hosts = 2
    ranks: Ranks = 1
    timeout: Timeout = 900.0
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write the tables.")] = None
    plot: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw losses over bytes and over time.")] = None
    law: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json", help="Write the loss law of thinwire plan, fitted to the runs that are there."
        ),
    ] = None
    page: Page = None


@expand_options
def islands(options: IslandsOptions) -> None:
    """Train the same model in islands, synchronously and with peers; compare losses at equal tokens, bytes, and the
    time to a validation loss on slow links.

    Losses come from runs on real ranks, one after the other. Steps are timed in the lab, over whole cycles of
    exchanges, with as many hosts as an arm has nodes. What has been made is kept: Ctrl-C ends the command, and the same
    command continues. Steps are only comparable if they are timed on a machine that does nothing else.

    [bold]Examples[/bold]

      thinwire bench islands --plot docs/results/islands.png --page docs/islands-study.md

      thinwire bench islands --parts none

      thinwire bench islands --arms exact,islands-32 --seeds 0 --results brief --work runs/brief
    """
    with explained():
        from thinwire_bench.study.curves import Curves

        study, results, parts = _study(options), options.results or RESULTS, _chosen_parts(options.parts)
        curves = Curves(results)
        finished = "loss" not in parts or _train(study, curves, options)
        times = _times(study, results, options, measures=finished and "times" in parts)
        rows = _step_rows(results, options, measures=finished and "steps" in parts)
        _report(options, study, curves.read(study.runs), times, rows)
        if not finished:
            raise typer.Exit(130)


def _chosen_parts(text: str) -> list[str]:
    from thinwire.errors import SpecError

    chosen = [] if text == "none" else words(text)
    unknown = [part for part in chosen if part not in _PARTS]
    if unknown:
        raise SpecError(
            "--parts", [f"there is no part {part!r}; valid are none, {', '.join(_PARTS)}" for part in unknown]
        )
    return chosen


def _study(options: IslandsOptions) -> LossStudy:
    """The study, changed as the options say."""
    from thinwire.errors import SpecError, UsageError
    from thinwire.spec.io import read_toml_file
    from thinwire_bench.study.arms import LossStudy, changes

    if (options.tokens or options.seeds or options.arms) and options.results is None:
        raise UsageError("--tokens, --seeds and --arms make another study; name its directory with --results")
    changed = changes(options.tokens, options.seeds)
    if options.arms is not None:
        table, chosen = read_toml_file(options.study), words(options.arms)
        known = [arm.get("name") for arm in table.get("arms", ())]
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise SpecError("--arms", [f"there is no arm {name!r}; valid are {', '.join(known)}" for name in unknown])
        goals = table.get("goals", ())
        names = ("arm", "better_than", "sooner_than")
        changed["arms"] = [arm for arm in table["arms"] if arm["name"] in chosen]
        changed["goals"] = [goal for goal in goals if {goal[key] for key in names if key in goal} <= {*chosen}]
    return LossStudy.read(options.study, changed)


def _train(study: LossStudy, curves: Curves, options: IslandsOptions) -> bool:
    """Make the runs that are missing; False after an interruption."""
    from thinwire_bench.peers.catalog import check_packages
    from thinwire_bench.study.queue import Queue

    check_packages([arm.loop.system for arm in study.spec.arms if arm.loop is not None])
    return Queue(study, curves, options.work, wide_console()).run()


def _times(study: LossStudy, results: Path, options: IslandsOptions, *, measures: bool) -> dict[Factor, list[ArmTime]]:
    """Times of all arms, by their ranks; measured where they are missing."""
    from thinwire_bench.study.islands import arm_times, by_ranks, timed_systems

    found = {}
    for ranks, runs in by_ranks(study).items():
        path = results / f"times-{ranks.nodes}x{ranks.local}.json"
        tokens = (
            runs[0].plan.data_ranks * runs[0].plan.micro_batch * runs[0].plan.micro_batches * runs[0].recipe.train.seq
        )
        rows = _rows(path, timed_systems(runs), ranks, tokens, options, measures=measures)
        if rows:
            found[ranks] = arm_times(rows)
    return found


def _step_rows(results: Path, options: IslandsOptions, *, measures: bool) -> list[SystemRow]:
    """Steps of presets and peers; measured if they are missing."""
    from thinwire.spec.factor import Factor
    from thinwire_bench.study.islands import step_systems

    ranks = Factor(local=options.ranks, nodes=options.nodes)
    systems = step_systems(ranks, {"model": checked_model(options.model), "seq": options.seq})
    path = results / f"steps-{options.model}-{ranks.nodes}x{ranks.local}.json"
    return _rows(path, systems, ranks, options.seq * ranks.ranks, options, measures=measures)


def _rows(
    path: Path, systems: Sequence[SystemSpec], ranks: Factor, tokens: int, options: IslandsOptions, *, measures: bool
) -> list[SystemRow]:
    """Rows of the files of all links, ``path`` with the link in its name; measured first where there is none."""
    from thinwire_bench.peers.catalog import check_packages
    from thinwire_bench.study.islands_times import TimeFile
    from thinwire_bench.systems.interleave import Session

    found = []
    for link in words(options.bandwidth):
        file = TimeFile(path.with_stem(f"{path.stem}-{link}"), systems)
        rows = file.read()
        if not rows and measures:
            check_packages([system.label for system in systems])
            session = Session(ranks.nodes, ranks.local, options.rounds, options.steps, options.timeout, progress)
            rows = measured(systems, settings_of([link]), session, tokens=tokens)
            about = {"rounds": options.rounds, "steps": options.steps, "tokens": tokens}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_results(file.path, {**file.content(rows), **about})
        found += rows
    return found


def _report(
    options: IslandsOptions,
    study: LossStudy,
    curves: Sequence[Curve],
    times: Mapping[Factor, Sequence[ArmTime]],
    rows: Sequence[SystemRow],
) -> None:
    """Show the tables, and write the files that the options name."""
    from thinwire_bench.study.islands import reached, target_loss
    from thinwire_bench.study.islands_sheets import plain
    from thinwire_bench.study.outcome import missing_note, outcomes
    from thinwire_bench.study.outcome import plain as plain_losses

    all_times = [time for of_ranks in times.values() for time in of_ranks]
    target, ends = target_loss(study.spec, curves), outcomes(study.spec, curves)
    when = [] if target is None else reached(study.spec, curves, all_times, target)
    tables = _sheets(study, curves, times, rows, when)
    show(tables)
    note = missing_note(ends)
    if note is not None:
        wide_console().print(note, markup=False, soft_wrap=True)
    if options.json_path is not None:
        content = {**plain_losses(study.spec, ends), **plain(when, target)}
        options.json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.law is not None:
        from thinwire_bench.study.islands_law import fitted

        options.law.write_text(json.dumps(fitted(study, curves).to_dict(), indent=1) + "\n", encoding="utf-8")
    if options.plot is not None and all_times:
        from thinwire_bench.study.islands_chart import draw

        draw(study.spec, curves, all_times, target, options.plot)
    if options.page is not None:
        text = "\n".join([_about(study, curves), *([f"**{note}.**", ""] if note else []), markdown(tables)])
        insert_into(options.page, text, "thinwire bench islands --page")


def _sheets(
    study: LossStudy,
    curves: Sequence[Curve],
    times: Mapping[Factor, Sequence[ArmTime]],
    rows: Sequence[SystemRow],
    when: Sequence[Reached],
) -> list[Sheet]:
    """All tables for which something was measured."""
    from thinwire_bench.study.islands import by_ranks, target_loss
    from thinwire_bench.study.islands_sheets import goal_sheet, reached_sheet, step_sheets, time_sheet
    from thinwire_bench.study.outcome import outcomes
    from thinwire_bench.study.outcome import sheets as loss_sheets

    made = loss_sheets(study.spec, outcomes(study.spec, curves)) if curves else []
    target = target_loss(study.spec, curves)
    if times:
        ranks_of = {run.arm: ranks for ranks, runs in by_ranks(study).items() for run in runs}
        made.append(time_sheet(study.spec, times, ranks_of))
    if target is not None and when:
        made.append(reached_sheet(study, when, target))
    made += step_sheets(rows)
    goals = goal_sheet(study.spec, rows, when)
    return made if goals is None else [*made, goals]


def _about(study: LossStudy, curves: Sequence[Curve]) -> str:
    """What a reader needs to judge the tables."""
    versions = sorted({f"torch {curve.versions['torch']}, thinwire {curve.versions['thinwire']}" for curve in curves})
    spec, run = study.spec, study.runs[0]
    words: dict[str, Any] = {"arms": len(spec.arms), "seeds": len(spec.seeds)}
    counts = ", ".join(f"{number} {name}" for name, number in words.items())
    return f"{counts}, {spec.tokens:,} tokens a run in {run.steps:,} steps; {'; '.join(versions)}.\n"

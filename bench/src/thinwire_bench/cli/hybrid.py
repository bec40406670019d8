"""``thinwire bench hybrid``: speed and loss of policies that give each parallel dimension its own codec."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import (
    JsonPath,
    Page,
    checked_model,
    insert_into,
    markdown,
    measured,
    progress,
    refuse,
    settings_of,
    show,
    words,
    write_results,
)

if TYPE_CHECKING:
    from thinwire_bench.study.arms import LossStudy
    from thinwire_bench.study.curves import Curves
    from thinwire_bench.study.hybrid import PolicySpeed
    from thinwire_bench.study.outcome import ArmOutcome


@dataclass(frozen=True)
class HybridOptions:
    """The options of ``thinwire bench hybrid``."""

    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Policies; by default those of the paper and thinwire's.", show_default=False
        ),
    ] = None
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE|none,...", help="Bandwidth of each host's link in each direction.")
    ] = "200mbit,1gbit"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Dtype of messages. ZFP at rates 16 and 24 does not make bfloat16 smaller."),
    ] = "float32"
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each policy runs once on each link in every round.")] = 5
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn.")] = 2
    seq: Annotated[int, typer.Option("--seq", min=2, help="Sequence length in tokens.")] = 128
    micro_batches: Annotated[int, typer.Option(min=2, help="Micro-batches per step, of one sequence each.")] = 2
    model: Annotated[str, typer.Option(help="Model: llama-59m, llama-17m, llama-5m or llama-1m.")] = "llama-17m"
    loss: Annotated[
        bool,
        typer.Option("--loss", help="Also train the missing runs of the loss study, which takes an hour on two cores."),
    ] = False
    speed: Annotated[bool, typer.Option(help="Time steps in the lab; --no-speed reports losses only.")] = True
    timed: Annotated[
        str | None,
        typer.Option(metavar="FILE,...", help="Show the speeds of earlier --json files and time nothing."),
    ] = None
    study: Annotated[Path, typer.Option(metavar="STUDY.toml", help="The loss study.")] = Path(
        "recipes/hybrid/study.toml"
    )
    results: Annotated[Path, typer.Option(metavar="DIR", help="Directory of its finished runs.")] = Path(
        "docs/results/hybrid"
    )
    work: Annotated[Path, typer.Option(metavar="DIR", help="Directory for checkpoints and logs of its runs.")] = Path(
        "runs/hybrid"
    )
    json_path: JsonPath = None
    png_path: Annotated[Path | None, typer.Option("--png", metavar="OUT.png", help="Draw gains and losses.")] = None
    page: Page = None


@expand_options
def hybrid(options: HybridOptions) -> None:
    """Train one model with tensor, pipeline and data parallelism under each policy; report speed, bytes per axis and
    final loss.

    Speed is measured in the lab on four hosts of two ranks, with tensor parallelism inside a host and stages and
    data-parallel ranks across hosts; policies and plain torch are interleaved. Losses come from runs of
    `thinwire train` on eight ranks. Finished runs are kept. Ctrl-C saves a checkpoint of the current run; rerun the
    command to resume.

    [bold]Examples[/bold]

      thinwire bench hybrid --json docs/results/hybrid.json --png docs/results/hybrid.png --page docs/hybrid.md

      thinwire bench hybrid --loss --no-speed

      thinwire bench hybrid --policies hybrid,zhybrid:24-8 --bandwidth 50mbit --dtype bfloat16

      thinwire bench hybrid --timed docs/results/hybrid.json,docs/results/hybrid-bf16.json --page docs/hybrid.md
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire_bench.study.arms import LossStudy
        from thinwire_bench.study.curves import Curves
        from thinwire_bench.study.hybrid import draw, goals, sheets
        from thinwire_bench.study.outcome import missing_note, outcomes, plain
        from thinwire_bench.study.outcome import sheets as loss_sheets

        if options.timed is not None and options.json_path is not None:
            raise UsageError(
                f"--json {options.json_path} would repeat the figures of --timed {options.timed}: leave one out"
            )
        study, curves = LossStudy.read(options.study, {}), Curves(options.results)
        finished = not options.loss or _finish(study, curves, options.work)
        by_dtype = _speeds(options)
        ends = outcomes(study.spec, curves.read(study.runs))
        tables = [table for dtype, speeds in by_dtype.items() for table in sheets(speeds, dtype)]
        tables += [*goals(by_dtype), *loss_sheets(study.spec, ends)]
        show(tables)
        note = missing_note(ends)
        if note is not None:
            wide_console().print(note, markup=False, soft_wrap=True)
        if options.json_path is not None:
            content = _content(by_dtype.get(options.dtype, []), plain(study.spec, ends), options)
            write_results(options.json_path, content)
        if options.png_path is not None and by_dtype:
            draw(next(iter(by_dtype.values())), _losses(study, ends), options.png_path)
        if options.page is not None:
            text = markdown(tables) + (f"\n**{note}.**" if note else "")
            insert_into(options.page, text, "thinwire bench hybrid --page")
        if not finished:
            raise typer.Exit(130)


def _finish(study: LossStudy, curves: Curves, work: Path) -> bool:
    """Make the runs that are missing; False after an interruption."""
    from thinwire_bench.study.queue import Queue

    return Queue(study, curves, work, wide_console()).run()


def _speeds(options: HybridOptions) -> dict[str, list[PolicySpeed]]:
    """Speeds by the dtype of messages: from earlier results, measured now, or none at all."""
    if options.timed is not None:
        return dict(_read(Path(word.strip())) for word in options.timed.split(","))
    return {options.dtype: _time(options)} if options.speed else {}


def _time(options: HybridOptions) -> list[PolicySpeed]:
    """Every policy and plain torch, interleaved on an emulated cluster."""
    from thinwire_bench.study.hybrid import NODES, RANKS, GridWorkload, policies, speeds, systems
    from thinwire_bench.systems.interleave import Session

    names = policies(None if options.policies is None else words(options.policies))
    workload = GridWorkload(checked_model(options.model), options.seq, options.dtype, options.micro_batches)
    session = Session(NODES, RANKS, options.rounds, options.steps, timeout=900.0, report=progress)
    tokens = 2 * options.micro_batches * options.seq
    rows = measured(systems(names, workload), settings_of(words(options.bandwidth)), session, tokens=tokens)
    refuse(rows)
    return speeds(rows, options.model, options.seq)


def _read(path: Path) -> tuple[str, list[PolicySpeed]]:
    """Dtype of messages and speeds of earlier results."""
    from thinwire.errors import UsageError
    from thinwire_bench.study.hybrid import PolicySpeed

    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        return str(results["dtype"]), [PolicySpeed(**speed) for speed in results["speeds"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--timed {path} holds no speeds of thinwire bench hybrid --json: {error!r}") from error


def _losses(study: LossStudy, ends: Sequence[ArmOutcome]) -> dict[str, list[float]]:
    """By the policy of each arm, how far its loss lies above the baseline's with each seed, in percent."""
    policy_of = {arm.name: arm.plan.get("wire", {}).get("policy", arm.name) for arm in study.spec.arms}
    return {str(policy_of[outcome.arm]): list(outcome.excess.values()) for outcome in ends}


def _content(speeds: Sequence[PolicySpeed], losses: dict[str, Any], options: HybridOptions) -> dict[str, Any]:
    """The figures that ``--json`` writes."""
    from thinwire_bench.study.hybrid import NODES, RANKS

    return {
        "speeds": [asdict(speed) for speed in speeds],
        "losses": losses,
        "workload": {
            "model": options.model,
            "seq": options.seq,
            "micro_batches": options.micro_batches,
            "nodes": NODES,
            "ranks": RANKS,
        },
        "dtype": options.dtype,
        "rounds": options.rounds,
    }

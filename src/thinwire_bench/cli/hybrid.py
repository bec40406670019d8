"""``thinwire bench hybrid``: a codec for each parallel dimension, in speed and in loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire_bench.cli.bench import checked_model, measured, refuse, settings_of, write_results

if TYPE_CHECKING:
    from thinwire_bench.study.arms import Study
    from thinwire_bench.study.curves import Curves
    from thinwire_bench.study.hybrid import Speed
    from thinwire_bench.study.outcome import ArmOutcome


def hybrid(
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Those of the paper and ours unless said.", show_default=False),
    ] = None,
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE|none,...", help="Of each host's link, in each direction.")
    ] = "200mbit,1gbit",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Of messages. ZFP at rates 16 and 24 makes nothing of bfloat16 smaller."),
    ] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each policy runs under each link once a round.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")] = 2,
    seq: Annotated[int, typer.Option("--seq", min=2, help="Tokens of a sequence.")] = 128,
    micro_batches: Annotated[int, typer.Option(min=2, help="Of a step, one sequence each.")] = 2,
    model: Annotated[str, typer.Option(help="llama-17m, llama-5m or llama-1m.")] = "llama-17m",
    loss: Annotated[
        bool, typer.Option("--loss", help="Also make the missing runs of the loss study: an hour on two cores.")
    ] = False,
    speed: Annotated[bool, typer.Option(help="Time steps in the lab; without, only losses.")] = True,
    timed: Annotated[
        str | None,
        typer.Option(metavar="FILE,...", help="Show the speeds of earlier --json files, and time nothing."),
    ] = None,
    study: Annotated[Path, typer.Option(metavar="STUDY.toml", help="The loss study.")] = Path(
        "recipes/hybrid/study.toml"
    ),
    results: Annotated[Path, typer.Option(metavar="DIR", help="Its finished runs.")] = Path("docs/results/hybrid"),
    work: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoints and logs of its runs.")] = Path("runs/hybrid"),
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT.json", help="Write every figure.")] = None,
    png_path: Annotated[Path | None, typer.Option("--png", metavar="OUT.png", help="Draw gains and losses.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="Replace the results in a page, between its two marks.")
    ] = None,
) -> None:
    """Train one model with tensor, pipeline and data parallelism under each policy: how fast, with which bytes on which
    axis, and where its loss ends.

    Speed is measured in the lab: four hosts of two ranks, tensor parallelism inside a host, stages and data-parallel
    ranks across; every policy beside plain torch, rounds interleaved. Losses come from runs of `thinwire train` on
    eight ranks, which are kept and not made again; Ctrl-C saves the run at hand, and the same command continues.

    [bold]Examples[/bold]

      thinwire bench hybrid --json docs/results/hybrid.json --png docs/results/hybrid.png --page docs/hybrid.md

      thinwire bench hybrid --loss --no-speed

      thinwire bench hybrid --policies hybrid,zhybrid:24-8 --bandwidth 50mbit --dtype bfloat16

      thinwire bench hybrid --timed docs/results/hybrid.json,docs/results/hybrid-bf16.json --page docs/hybrid.md
    """
    with explained():
        from thinwire.errors import UsageError
        from thinwire.report import insert, markdown_table, rich_table
        from thinwire_bench.study.arms import Study
        from thinwire_bench.study.curves import Curves
        from thinwire_bench.study.hybrid import draw, goals, sheets
        from thinwire_bench.study.outcome import missing_note, outcomes, plain
        from thinwire_bench.study.outcome import sheets as loss_sheets

        if timed is not None and json_path is not None:
            raise UsageError(f"--json {json_path} would be the same figures as --timed {timed}: leave one out")
        names = None if policies is None else [word.strip() for word in policies.split(",") if word.strip()]
        chosen, curves = Study.read(study, {}), Curves(results)
        finished = not loss or _finish(chosen, curves, work)
        by_dtype: dict[str, list[Speed]] = {}
        if timed is not None:
            by_dtype = dict(_read(Path(word.strip())) for word in timed.split(","))
        elif speed:
            by_dtype = {dtype: _time(names, bandwidth, dtype, rounds, steps, seq, micro_batches, model)}
        found = outcomes(chosen.spec, curves.read(chosen.runs))
        tables = [table for dtype, speeds in by_dtype.items() for table in sheets(speeds, dtype)]
        tables += [*goals(by_dtype), *loss_sheets(chosen.spec, found)]
        console = wide_console()
        for table in tables:
            console.print(rich_table(table), "")
        note = missing_note(found)
        if note is not None:
            console.print(note, markup=False, soft_wrap=True)
        if json_path is not None:
            _write(
                json_path, by_dtype.get(dtype, []), plain(chosen.spec, found), dtype, rounds, model, seq, micro_batches
            )
        if png_path is not None and by_dtype:
            draw(next(iter(by_dtype.values())), _losses(chosen, found), png_path)
        if page is not None:
            lines = [line for table in tables for line in markdown_table(table)]
            text = "\n".join([*lines, *([f"**{note}.**"] if note else [])])
            text = insert(page.read_text(encoding="utf-8"), text, "thinwire bench hybrid --page")
            page.write_text(text, encoding="utf-8")
        if not finished:
            raise typer.Exit(130)


def _finish(study: Study, curves: Curves, work: Path) -> bool:
    """Make the runs that are missing; False after an interruption."""
    from thinwire_bench.study.queue import Queue

    return Queue(study, curves, work, wide_console()).run()


def _time(
    names: Sequence[str] | None,
    bandwidth: str,
    dtype: str,
    rounds: int,
    steps: int,
    seq: int,
    micro_batches: int,
    model: str,
) -> list[Speed]:
    """Every policy and plain torch, interleaved on an emulated cluster."""
    from thinwire_bench.study.hybrid import NODES, RANKS, speeds, systems
    from thinwire_bench.study.hybrid import policies as checked

    specs = systems(checked(names), checked_model(model), seq, dtype, micro_batches)
    settings = settings_of([word.strip() for word in bandwidth.split(",") if word.strip()], ["none"])
    rows = measured(specs, settings, NODES, RANKS, rounds, steps, tokens=2 * micro_batches * seq, timeout=900.0)
    refuse(rows)
    return speeds(rows, model, seq)


def _read(path: Path) -> tuple[str, list[Speed]]:
    """Dtype and speeds of earlier results."""
    from thinwire.errors import UsageError
    from thinwire_bench.study.hybrid import Speed

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return str(found["dtype"]), [Speed(**speed) for speed in found["speeds"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--timed {path} holds no speeds of thinwire bench hybrid --json: {error!r}") from error


def _losses(study: Study, found: Sequence[ArmOutcome]) -> dict[str, list[float]]:
    """Percent over the baseline's loss, seed by seed, by the policy of each arm."""
    policy_of = {arm.name: arm.plan.get("wire", {}).get("policy", arm.name) for arm in study.spec.arms}
    return {str(policy_of[outcome.arm]): list(outcome.excess.values()) for outcome in found}


def _write(
    path: Path,
    speeds: Sequence[Speed],
    losses: dict[str, Any],
    dtype: str,
    rounds: int,
    model: str,
    seq: int,
    micro_batches: int,
) -> None:
    from thinwire_bench.study.hybrid import NODES, RANKS

    content = {
        "speeds": [asdict(speed) for speed in speeds],
        "losses": losses,
        "workload": {"model": model, "seq": seq, "micro_batches": micro_batches, "nodes": NODES, "ranks": RANKS},
        "dtype": dtype,
        "rounds": rounds,
    }
    write_results(path, content)

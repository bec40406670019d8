"""``thinwire bench units``: what a deep model of small units costs the host, beside DDP and FSDP2."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import JsonPath, Page, insert_into, markdown, progress, show, words, write_results


@dataclass(frozen=True)
class UnitsOptions:
    """The options of ``thinwire bench units``."""

    plans: Annotated[
        str, typer.Option(metavar="NAME,...", help="Presets: zero1 (beside DDP) and zero3 (beside FSDP2).")
    ] = "zero1,zero3"
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of the model; each is a unit of ten tensors.")] = 200
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Numbers of ranks; all run on this machine.")] = "1,2"
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each system.")] = 12
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn; a warm-up step precedes them.")] = 3
    batch: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Bytes of small units that travel as one, such as 4MiB; 0: as presets say."),
    ] = "0"
    json_path: JsonPath = None
    page: Page = None


@expand_options
def units(options: UnitsOptions) -> None:
    """Train a deep model of small units in turns; report what a unit costs the host in each pass, and step times.

    [bold]Examples[/bold]

      thinwire bench units

      thinwire bench units --plans zero3 --blocks 50 --ranks 2 --json units.json
    """
    with explained():
        from thinwire.units import parse_bytes

        presets, worlds, batch = words(options.plans), _numbers(options.ranks), parse_bytes(options.batch)
        _check(presets)
        from thinwire_bench.study.units import costs_sheet, goals_of, goals_sheet, measure

        costs = [
            cost
            for ranks in worlds
            for cost in measure(ranks, presets, options.blocks, options.rounds, options.steps, progress, batch=batch)
        ]
        tables = [costs_sheet(costs, options.blocks), goals_sheet(costs)]
        show(tables)
        if options.json_path is not None:
            content = {
                "blocks": options.blocks,
                "rounds": options.rounds,
                "steps": options.steps,
                "batch_bytes": batch,
                "rows": [asdict(cost) for cost in costs],
                "goals": [asdict(goal) | {"reached": goal.reached} for goal in goals_of(costs)],
            }
            write_results(options.json_path, content)
        if options.page is not None:
            insert_into(options.page, markdown(tables), "thinwire bench units --page")


def _check(presets: list[str]) -> None:
    from thinwire.errors import SpecError
    from thinwire_bench.study.units import PEERS

    unknown = [preset for preset in presets if preset not in PEERS]
    if unknown or not presets or len(set(presets)) < len(presets):
        wrong = ", ".join(unknown or presets) or "nothing"
        raise SpecError("--plans", [f"{wrong}: name presets once each; valid are {', '.join(PEERS)}"])


def _numbers(text: str) -> list[int]:
    from thinwire.errors import SpecError

    numbers = words(text)
    if not numbers or not all(number.isdecimal() and int(number) for number in numbers):
        raise SpecError("--ranks", [f"{text!r}: give numbers of ranks from 1, such as 1,2"])
    return [int(number) for number in numbers]

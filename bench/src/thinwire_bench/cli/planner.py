"""``thinwire bench planner``: compares the planner's predictions with steps measured in the lab."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.options import expand_options
from thinwire.errors import UsageError
from thinwire_bench.cli.shared import (
    Hosts,
    JsonPath,
    Page,
    Ranks,
    Timeout,
    checked_model,
    insert_into,
    markdown,
    progress,
    settings_of,
    show,
    write_results,
)

if TYPE_CHECKING:
    from thinwire.spec.profile import Profile
    from thinwire_bench.study.pairs import Choice, Pair
    from thinwire_bench.study.planning import Setup


@dataclass(frozen=True)
class PlannerOptions:
    """The options of ``thinwire bench planner``."""

    models: Annotated[str, typer.Option(metavar="NAME,...", help="Models of the lab.")] = "llama-17m,llama-5m,llama-1m"
    bandwidth: Annotated[str, typer.Option(metavar="RATE,...", help="Bandwidths of each host's link.")] = (
        "none,1gbit,200mbit"
    )
    seq: Annotated[int, typer.Option(min=8, help="Sequence length in tokens.")] = 128
    nodes: Hosts = 2
    ranks: Ranks = 2
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the interleaved measurements.")] = 4
    budget: Annotated[str, typer.Option(metavar="TIME", help="Time budget of each profile.")] = "60s"
    profiles: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory for profiles; profiles that it already holds are used."),
    ] = None
    again: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing: predict the pairs of an earlier --json file with the current model, from the "
            "--profiles of that time.",
        ),
    ] = None
    timeout: Timeout = 600.0
    json_path: JsonPath = None
    page: Page = None


@expand_options
def planner(options: PlannerOptions) -> None:
    """Profile each link, predict the steps of twelve or more plans, including the planner's choices, and measure them.

    [bold]Examples[/bold]

      thinwire bench planner --json planner.json

      thinwire bench planner --models llama-5m --bandwidth 200mbit --budget 30s --rounds 2

      thinwire bench planner --again docs/results/planner.json --profiles docs/results/planner
    """
    with explained():
        from thinwire_bench.study.pairs import sheets
        from thinwire_bench.study.planning import changed_choices, measure, predict_again

        setup = _setup(options)
        known = _known(options, setup)
        earlier: dict[str, Any] | None = None
        if options.again is None:
            pairs, choices, plans = measure(setup, known)
            tables = sheets(pairs, choices)
        else:
            earlier, pairs, choices, plans = _earlier(options.again)
            pairs = predict_again(setup, known, pairs, plans)
            tables = sheets(pairs, choices, changed_choices(setup, known, choices, plans))
        show(tables)
        if options.json_path is not None:
            content = {
                "pairs": [asdict(pair) for pair in pairs],
                "choices": [asdict(choice) for choice in choices],
                "plans": plans,
            }
            write_results(options.json_path, content, earlier=earlier)
        insert_into(options.page, markdown(tables), "thinwire bench planner --page")


def _setup(options: PlannerOptions) -> Setup:
    """The models and links to measure, and for how long."""
    from thinwire_bench.study.planning import Setup

    return Setup(
        models=[checked_model(name.strip()) for name in options.models.split(",")],
        settings=settings_of([word.strip() for word in options.bandwidth.split(",")]),
        seq=options.seq,
        nodes=options.nodes,
        ranks=options.ranks,
        rounds=options.rounds,
        timeout=options.timeout,
        report=progress,
    )


def _known(options: PlannerOptions, setup: Setup) -> dict[str, Profile]:
    """The profile of each link, by its bandwidth; measured now unless ``--profiles`` has it.

    Raises:
        UsageError: ``--again`` is given without the profiles of that time, or a profile failed.
    """
    from thinwire.units import parse_duration
    from thinwire_bench.study.planning import profile_links

    if options.again is not None and (options.profiles is None or not options.profiles.is_dir()):
        raise UsageError(f"--again {options.again} needs --profiles DIR: the profiles by which its plans were chosen")
    with tempfile.TemporaryDirectory(prefix="thinwire-planner-") as temporary:
        directory = options.profiles or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        return profile_links(setup, parse_duration(options.budget), directory)


def _earlier(path: Path) -> tuple[dict[str, Any], list[Pair], list[Choice], dict[str, str]]:
    """Earlier results: the whole file, its pairs, its choices and its plans."""
    from thinwire_bench.study.pairs import Choice, Pair

    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        pairs = [Pair(**pair) for pair in results["pairs"]]
        choices = [Choice(**choice) for choice in results["choices"]]
        plans = dict(results["plans"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--again {path} holds no pairs of thinwire bench planner --json: {error!r}") from error
    return results, pairs, choices, plans

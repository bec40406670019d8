"""``thinwire bench techniques``, ``kernels``, ``stages`` and ``backward``: what each part of a step gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.console import wide_console
from thinwire.cli.errors import explained
from thinwire.cli.options import expand_options
from thinwire_bench.cli.shared import (
    Hosts,
    JsonPath,
    Page,
    Ranks,
    checked_model,
    insert_into,
    measured,
    progress,
    refuse,
    settings_of,
    write_results,
)

if TYPE_CHECKING:
    from thinwire.report import Sheet
    from thinwire.spec import Plan
    from thinwire_bench.peers.interface import SystemSpec
    from thinwire_bench.systems.rows import SystemRow


@dataclass(frozen=True)
class TurnOptions:
    """Options of every command here: hosts, lengths, model, and where results go."""

    nodes: Hosts = 2
    ranks: Ranks = 2
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; each plan runs once under each setting in every round.")
    ] = 5
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per turn.")] = 2
    seq: Annotated[int, typer.Option("--seq", min=1, help="Tokens per step of each rank.")] = 128
    model: Annotated[str, typer.Option(help="Model: llama-59m, llama-17m, llama-5m or llama-1m.")] = "llama-17m"
    json_path: JsonPath = None
    page: Page = None

    def workload(self) -> dict[str, Any]:
        """The options of every system's model."""
        return {"model": checked_model(self.model), "seq": self.seq}

    def described(self) -> dict[str, Any]:
        """What the JSON file says about the measurement."""
        workload = {"model": self.model, "seq": self.seq, "nodes": self.nodes, "ranks": self.ranks}
        return {"rounds": self.rounds, "workload": workload}


@dataclass(frozen=True)
class TechniquesOptions:
    """The options of ``thinwire bench techniques``."""

    slow: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth of each host's slow link.")] = "200mbit"
    fast: Annotated[
        str,
        typer.Option(
            metavar="RATE", help="Bandwidth of the fast link; zero3 on it is compared with zeropp on the slow one."
        ),
    ] = "800mbit"
    turns: TurnOptions = TurnOptions()


@expand_options
def techniques(options: TechniquesOptions) -> None:
    """Time ZeRO-3 with each technique of ZeRO++ alone and with all of them. Do their gains multiply, and are they worth
    four times the bandwidth?

    [bold]Examples[/bold]

      thinwire bench techniques --json techniques.json

      thinwire bench techniques --slow 100mbit --fast 400mbit --rounds 3
    """
    with explained():
        from thinwire_bench.study.gains import across_bandwidths, gains, product_of_single, sheet, technique_systems

        slow, fast, turns = options.slow, options.fast, options.turns
        systems = technique_systems(turns.workload(), turns.nodes, turns.ranks)
        rows = _timed(systems, [slow, fast], turns)
        measured_gains = gains(rows)
        ratio, least, most = across_bandwidths(rows, slow, fast)
        sentence = f"zeropp at {slow} is {ratio:.2f} times as fast as zero3 at {fast} ({least:.2f} to {most:.2f})."
        content = {
            "gains": [asdict(gain) for gain in measured_gains],
            "product_of_single": {rate: product_of_single(measured_gains, rate) for rate in (slow, fast)},
            "zeropp_slow_over_zero3_fast": [ratio, least, most],
            **turns.described(),
        }
        table = sheet(measured_gains, "Gain over zero3: median of rounds, least, most", product=True)
        _publish(table, sentence, content, "techniques", turns)


@dataclass(frozen=True)
class KernelsOptions:
    """The options of ``thinwire bench kernels``."""

    plan: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help="Plan whose codecs to compare.")] = "zeropp"
    bandwidth: Annotated[str, typer.Option(metavar="RATE|none", help="Bandwidth of each host's link.")] = "200mbit"
    turns: TurnOptions = TurnOptions()


@expand_options
def kernels(options: KernelsOptions) -> None:
    """Time the same training step with codecs in plain PyTorch, with native codecs without their fused forms, and with
    native codecs. All three write the same bytes.

    [bold]Examples[/bold]

      thinwire bench kernels

      thinwire bench kernels --plan thinwire --bandwidth none --model llama-5m
    """
    with explained():
        from thinwire_bench.study.gains import backend_systems

        plan = _plan(options.plan, options.turns)
        systems = backend_systems(plan, options.turns.workload())
        title = f"Codecs of {options.plan}: gain over plain PyTorch, median of rounds, least, most"
        _compare(systems, plan, title, options.bandwidth, "kernels", options.turns)


@dataclass(frozen=True)
class StagesOptions:
    """The options of ``thinwire bench stages``."""

    plan: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help="Plan whose collectives to compare.")] = "zeropp"
    bandwidth: Annotated[str, typer.Option(metavar="RATE|none", help="Bandwidth of each host's link.")] = "200mbit"
    turns: TurnOptions = TurnOptions()


@expand_options
def stages(options: StagesOptions) -> None:
    """Time the same training step with collectives one at a time, and with hops and codecs of different buckets
    overlapping, for several bucket sizes.

    [bold]Examples[/bold]

      thinwire bench stages

      thinwire bench stages --plan thinwire --bandwidth 50mbit --rounds 3
    """
    with explained():
        from thinwire_bench.study.gains import stage_systems

        plan = _plan(options.plan, options.turns)
        systems = stage_systems(plan, options.turns.workload())
        title = (
            f"Collectives of {options.plan}: gain over one bucket, one collective at a time; median of rounds, least, "
            "most"
        )
        _compare(systems, plan, title, options.bandwidth, "stages", options.turns)


@dataclass(frozen=True)
class BackwardOptions:
    """The options of ``thinwire bench backward``."""

    plan: Annotated[str, typer.Option(metavar="NAME|FILE.toml", help="Plan whose backward to compare.")] = "zero3"
    bandwidth: Annotated[str, typer.Option(metavar="RATE|none", help="Bandwidth of each host's link.")] = "1gbit"
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute blocks in the backward.")] = False
    turns: TurnOptions = TurnOptions()


@expand_options
def backward(options: BackwardOptions) -> None:
    """Time the same training step with reductions that start after or before the input gradient, with a backward that
    gathers one module or one block ahead, with modules that travel apart or together, with units that stay gathered
    within a limit, and with all of these.

    [bold]Examples[/bold]

      thinwire bench backward

      thinwire bench backward --plan zero1 --bandwidth 200mbit

      thinwire bench backward --recompute --rounds 10
    """
    with explained():
        from thinwire_bench.study.gains import BACKWARD_PAIRS, backward_systems, gains, paired, sheet

        plan = _plan(options.plan, options.turns).with_(recompute=options.recompute)
        rows = _timed(backward_systems(plan, options.turns.workload()), [options.bandwidth], options.turns)
        over_blocks, by_pairs = gains(rows), paired(rows, BACKWARD_PAIRS)
        again = ", recomputed" if options.recompute else ""
        table = sheet(
            over_blocks,
            f"Backward of {options.plan}{again}: gain over blocks, median of rounds, least, most",
            product=False,
        )
        sentence = "; ".join(
            f"{gain.system.removeprefix('tw:')} over {BACKWARD_PAIRS[gain.system].removeprefix('tw:')}: "
            f"{gain.gain:.3f} ({gain.smallest:.3f} to {gain.largest:.3f})"
            for gain in by_pairs
        )
        above = {row.system: row.bound_ratio for row in rows}
        sentence += ". Step over its bound: " + ", ".join(
            f"{label.removeprefix('tw:')} {ratio:.2f}" for label, ratio in above.items()
        )
        content = {
            "gains": [asdict(gain) for gain in over_blocks],
            "step_over_bound": above,
            "pairs": [{**asdict(gain), "over": BACKWARD_PAIRS[gain.system]} for gain in by_pairs],
            "plan": plan.to_dict(),
            **options.turns.described(),
        }
        _publish(table, sentence + ".", content, "backward", options.turns)


def _plan(name: str, turns: TurnOptions) -> Plan:
    from thinwire_bench.peers.catalog import named_plan

    return named_plan(name, turns.nodes, turns.ranks)


def _compare(
    systems: Sequence[SystemSpec], plan: Plan, title: str, bandwidth: str, command: str, turns: TurnOptions
) -> None:
    """Time variants of one plan, and publish their gains over the first."""
    from thinwire_bench.study.gains import gains, sheet

    measured_gains = gains(_timed(systems, [bandwidth], turns))
    content = {
        "gains": [asdict(gain) for gain in measured_gains],
        "plan": plan.to_dict(),
        **turns.described(),
    }
    _publish(sheet(measured_gains, title, product=False), "", content, command, turns)


def _timed(systems: Sequence[SystemSpec], bandwidths: Sequence[str], turns: TurnOptions) -> list[SystemRow]:
    """The rows of the systems under each bandwidth, all interleaved in one run."""
    from thinwire_bench.systems.interleave import Session

    session = Session(turns.nodes, turns.ranks, turns.rounds, turns.steps, timeout=600.0, report=progress)
    rows = measured(systems, settings_of(bandwidths), session, tokens=turns.seq * session.world)
    refuse(rows)
    return rows


def _publish(table: Sheet, sentence: str, content: Mapping[str, Any], command: str, turns: TurnOptions) -> None:
    """Print a table and a sentence about it; write the JSON file and the page that the options name."""
    from thinwire.report import markdown_table, rich_table

    console = wide_console()
    console.print(rich_table(table))
    if sentence:
        console.print(sentence)
    if turns.json_path is not None:
        write_results(turns.json_path, content)
    if turns.page is not None:
        text = "\n".join([*markdown_table(table), sentence])
        insert_into(turns.page, text, f"thinwire bench {command} --page")

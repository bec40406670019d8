"""``thinwire train``: trains a model by a recipe, draws its loss curve, and prints a summary."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.terminal.console import command_line, say, shown
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.former import formerly
from thinwire.cli.terminal.options import expand_options
from thinwire.cli.training.advice import advised
from thinwire.errors import UsageError
from thinwire.extras import require
from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thinwire.record import RunRecord
    from thinwire.spec.expectation import Expectation
    from thinwire.spec.plan import Plan
    from thinwire.spec.recipe import Recipe
    from thinwire.train.directory import RunDirectory
    from thinwire.train.environment import Started
    from thinwire.train.launching.resolved import ResolvedRun
    from thinwire.train.observing.progress import Stream

RUNS = Path("runs")
"""Parent of the directories of runs without ``--out``."""


@dataclass(frozen=True)
class TrainOptions:
    """The arguments and options of ``thinwire train``; each field's help says what it is."""

    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="What to train; see recipes/.")]
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|config.json",
            help="What to train, instead of the recipe's model: a Hugging Face model's directory, from its weights if "
            "it has any, or a configuration.",
        ),
    ] = None
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN.toml|preset:NAME|auto",
            help="How to shard it, instead of the recipe's plan; auto measures the cluster, tries plans and takes the "
            "fastest.",
        ),
    ] = None
    profile: Annotated[
        Path | None, typer.Option(metavar="PROFILE.json", help="With --plan auto: do not measure again.")
    ] = None
    codecs: Annotated[
        Literal["none", "lossless", "standard", "aggressive"] | None,
        typer.Option(
            help="With --plan auto: how lossy codecs may be; without this option, auto uses none that lose anything.",
            show_default="lossless",
        ),
    ] = None
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; on one machine they are logical.")] = None
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks per node.")] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe or, as plan.KEY, of the plan."),
    ] = None
    out: Annotated[
        Path | None, typer.Option(envvar="THINWIRE_OUT", help="Directory of the run; by default a new one under runs/.")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON to stdout; progress goes to stderr.")
    ] = False


@formerly(
    {
        "--elastic": "--set cluster.elastic=true",
        "--island": "--set cluster.island={}",
        "--lighthouse": "--set cluster.lighthouse={}",
        "--trace-steps": "--set train.trace_steps={}",
    }
)
@expand_options
def train(options: TrainOptions) -> None:
    """Train a model on all ranks of this machine, or as one rank under torchrun or SLURM.

    Ctrl-C and SIGTERM save and leave; a lost rank restarts the run from its last checkpoint.

    [bold]Examples[/bold]

      thinwire train recipes/quickstart.toml

      thinwire train recipes/quickstart.toml --plan preset:zero3 --nodes 2 --nproc 2 --set train.steps=50

      thinwire train recipes/quickstart.toml --plan auto --codecs standard --nodes 2 --nproc 2

      thinwire train recipes/quickstart.toml --set plan.tp=2 --set plan.pp=2 --nodes 1 --nproc 4

      thinwire train recipes/quickstart.toml --out runs/quickstart --resume

      thinwire train recipes/quickstart.toml --set train.trace_steps=10:13

      thinwire train recipes/quickstart.toml --model ~/models/qwen3

      torchrun --nproc-per-node 4 -m thinwire.cli.main train recipes/quickstart.toml --out runs/torchrun
    """
    with explained(as_json=options.as_json):
        require("train", "thinwire train")
        from thinwire.train.environment import hardware, started
        from thinwire.train.launching.resolved import resolve_run
        from thinwire.train.observing.progress import run_console
        from thinwire.train.processes.server import called

        ranks = started()
        recipe = _recipe(options)
        directory = _directory(options, ranks)
        stream: Stream = "stderr" if options.as_json else "stdout"
        asked = recipe.cluster.device
        # A process that is not a rank itself asks the server of ranks, which has torch.
        found = called(hardware, asked) if ranks is None else hardware(asked)
        run = resolve_run(recipe, directory, ranks, found, resume=options.resume, stream=stream)
        console = run_console(stderr=options.as_json, quiet=ranks is not None and ranks.rank > 0)
        run, kept = _choose_plan(options, run, _expected(recipe), ranks, console)
        say(console, *(() if run.resume else _origin(run.recipe)), *run.notes, *run.replaced)
        with advised(options.recipe, run):
            if ranks is None:
                _launch(run, kept, console)
            else:
                _join(run, kept, console, ranks)
        if ranks is None or ranks.rank == 0:
            _finish(directory, console, options.as_json)


def _recipe(options: TrainOptions) -> Recipe:
    """The recipe, changed as the command line says."""
    from thinwire.spec.recipe import Recipe

    overrides = [*(options.settings or ())]
    cluster = {"nodes": options.nodes, "nproc": options.nproc}
    overrides += [f"cluster.{key}={value}" for key, value in cluster.items() if value is not None]
    plan = None if options.plan == "auto" else options.plan
    model = None if options.model is None else str(options.model)
    return Recipe.read(options.recipe, overrides, plan=plan, model=model)


def _choose_plan(
    options: TrainOptions, run: ResolvedRun, expected: Expectation | None, ranks: Started | None, console: Console
) -> tuple[ResolvedRun, dict[str, Any]]:
    """The run under the plan that ``--plan auto`` chooses, and what its directory keeps beside the plan, by arguments
    of :meth:`RunDirectory.open`: what the plan was chosen by, and what it should do.

    A run that continues on the same mesh keeps its plan.
    """
    from thinwire.cli.training.auto import choose_plan
    from thinwire.spec.plan import Plan

    if options.plan != "auto":
        for option, value in (("--profile", options.profile), ("--codecs", options.codecs)):
            if value is not None:
                raise UsageError(f"{option} {value} requires --plan auto")
        unlike = None if expected is None else expected.unlike(run.plan, run.recipe)
        if unlike is None:
            return run, {"expected": expected}
        say(console, f"what the plan file was expected to do is not kept, as {unlike}")
        return run, {}
    # torchrun starts ranks again after one was lost, or refused to train.
    continued = run.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    before = Plan.load(run.directory.plan) if continued and run.directory.plan.exists() else None
    if before is not None and _same_ranks(before, run.plan):
        return run.with_plan(before), {}
    plan, kept = choose_plan(run, ranks, options.profile, options.codecs, console)
    return run.with_plan(plan), kept


def _expected(recipe: Recipe) -> Expectation | None:
    """What ``thinwire plan --out`` has written beside the recipe's plan file, if there is one."""
    from thinwire.spec.expectation import Expectation

    file = recipe.plan.get("file")
    beside = None if file is None else Expectation.beside(Path(file))
    return Expectation.read(beside) if beside is not None and beside.is_file() else None


def _same_ranks(before: Plan, now: Plan) -> bool:
    """Whether a plan is for the ranks of this run, which the recipe may divide otherwise."""
    return before.mesh == now.mesh if (before.tp, before.pp) == (now.tp, now.pp) else before.ranks == now.ranks


def _origin(recipe: Recipe) -> tuple[str, ...]:
    """The weights that a Hugging Face model starts from, in one sentence; nothing for models of our own."""
    model = recipe.model
    if model.kind != "huggingface":
        return ()
    source = model.path or (model.config if isinstance(model.config, str) else "the recipe")
    if model.starts_from_files:
        return (f"starting from the weights in {source}",)
    return (f"starting at random, from seed {recipe.train.seed}: the configuration is that of {source}",)


def _directory(options: TrainOptions, ranks: Started | None) -> RunDirectory:
    from thinwire.checkpoint.durable import directory_of
    from thinwire.train.directory import RunDirectory

    if options.out is not None:
        return RunDirectory(directory_of(options.out).resolve())
    if ranks is not None:
        # Each rank would look for a free name by itself, and not all at the same moment.
        raise UsageError(
            f"--out is missing: {ranks.by} started this rank, and all ranks need one directory; add --out DIR"
        )
    return RunDirectory(default_directory(RUNS.resolve(), options.recipe.stem, resume=options.resume))


def default_directory(parent: Path, stem: str, *, resume: bool) -> Path:
    """The directory of a run that has no ``--out``: ``parent/stem``, ``parent/stem-2`` and so on; to resume, the one
    that was started last, as runs may be deleted and older ones resumed."""
    if resume:
        known = [one for one in parent.glob("*") if re.fullmatch(rf"{re.escape(stem)}(-\d+)?", one.name)]
        return max(known, key=_last_start, default=parent / stem)
    number, path = 1, parent / stem
    while path.exists() and any(path.iterdir()):
        number += 1
        path = parent / f"{stem}-{number}"
    return path


def _last_start(path: Path) -> float:
    """When a run was started last, or described if it has not begun; 0 for what is no run."""
    from thinwire.train.directory import RunDirectory

    directory = RunDirectory(path)
    return next((file.stat().st_mtime for file in (directory.starts, directory.recipe) if file.is_file()), 0.0)


def _launch(run: ResolvedRun, kept: dict[str, Any], console: Console) -> None:
    """Start this machine's ranks and wait for them."""
    from thinwire.program import idle_codecs
    from thinwire.train.data.packing import prepare
    from thinwire.train.environment import versions
    from thinwire.train.processes.launch import launch

    report = partial(say, console)
    directory, plan = run.directory, run.plan
    directory.check(resume=run.resume)
    if run.resume:
        directory.check_same(run.recipe)
    with directory.held(), directory.unless_refused():
        # Here rather than on the ranks: errors in the data are found before anything starts.
        dataset = prepare(run.recipe.data, report)
        directory.open(run.recipe, plan, versions(), command=command_line(), **kept)
        say(console, plan.describe(), *idle_codecs(plan))
        report(
            f"{len(dataset.train):,} tokens to train on, {len(dataset.validation):,} to validate, vocabulary "
            f"{dataset.vocab:,}, unigram entropy {dataset.unigram_entropy:.3f} nats"
        )
        report(f"writing to {shown(directory.path)}")
        launch(run, report)


def _join(run: ResolvedRun, kept: dict[str, Any], console: Console, ranks: Started) -> None:
    """Be one rank of a run that a launcher of the user's has started."""
    from thinwire.program import idle_codecs
    from thinwire.train.environment import agent, versions
    from thinwire.train.processes.worker import recorded_failure, train

    directory, plan = run.directory, run.plan
    with recorded_failure(directory.logs), contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            stack.enter_context(directory.held())
            stack.enter_context(directory.unless_refused())
            # torchrun starts refused ranks again, too: what they were refused is still refused.
            run = dataclasses.replace(run, resume=run.resume or directory.started_by(agent()))
            directory.check(resume=run.resume)
            if run.resume:
                directory.check_same(run.recipe)
            directory.open(run.recipe, plan, versions(), command=command_line(), **kept)
            say(console, plan.describe(), *idle_codecs(plan))
        train(run, launched=False)


def _finish(directory: RunDirectory, console: Console, as_json: bool) -> None:
    """Draw the loss curve and print the summary, or the step at which the run stopped."""
    from thinwire.record import read_run
    from thinwire.report.charts import loss_chart
    from thinwire.report.drawing import write_png

    run = read_run(directory.path)
    chart = loss_chart(run)
    if chart is not None:
        try:
            write_png(chart, directory.picture)
        except OSError as error:
            say(console, f"{directory.picture} cannot be written: {error.strerror}; the run itself has what it needs")
            with contextlib.suppress(OSError):
                directory.picture.unlink()  # a part of it
    if run.summary is None:
        if as_json:
            print(json.dumps({"stopped": True, "steps": run.last_step, "directory": str(directory.path)}))
        return
    if as_json:
        print(json.dumps(run.summary))
    console.print(summary_table(run))
    say(console, *files(directory))


def summary_table(run: RunRecord) -> Table:
    """Build the table of a run's results and its communication."""
    from thinwire.report.figures import figures

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    assert run.summary is not None, "it is complete"
    summary, numbers = run.summary, figures(run)
    table.add_row("validation loss", _loss(summary.get("final_val_loss"), "nats per token"))
    entropy = f"{summary['unigram_entropy']:.3f} nats per token"
    table.add_row("unigram entropy", f"{entropy}, for comparison: token frequencies alone")
    table.add_row("training loss", _loss(summary.get("final_train_loss"), f"after {summary['steps']} steps"))
    if numbers["tokens_per_second"]:
        table.add_row("speed", f"{numbers['tokens_per_second']:,.0f} tokens/s")
    if run.records:
        sent, exposed, codec = (numbers[name] for name in ("bytes_per_step", "exposed_seconds", "codec_seconds"))
        cut = [axis for axis in ("tp", "pp", "ep", "cp") if getattr(run.plan, axis) > 1]
        lines = [
            f"{kind} {format_bytes(hops['inside'])} inside nodes, {format_bytes(hops['across'])} across"
            for kind, hops in sent.items()
        ]
        lines += [f"{axis} not counted: torch's own group sends it" for axis in cut if axis not in sent]
        table.add_row("sent per step", "\n".join(lines) or "nothing: there is one rank")
        known = {axis for record in run.records for axis in record.get("exposed") or {}}
        unknown = " and ".join(axis for axis in cut if axis not in known)
        table.add_row("exposed per step", _seconds(exposed) + (f", not counting {unknown}" if unknown else ""))
        if codec:
            table.add_row("codecs per step", _seconds(codec))
    return table


def files(directory: RunDirectory) -> list[str]:
    """Lines below the table with the paths of a run's files, which a cell of the table would cut short."""
    paths = (directory.path, directory.metrics, directory.summary, directory.picture, directory.checkpoints)
    return [f"{'' if number else 'files':17} {shown(path)}" for number, path in enumerate(paths)]


def _loss(value: float | None, what: str) -> str:
    """A loss; the last one that a summary knows may not have been finite."""
    return "no finite number" if value is None else f"{value:.3f} {what}"


def _seconds(by_kind: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {format_duration(seconds)}" for kind, seconds in by_kind.items()) or "nothing"

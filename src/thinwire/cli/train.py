"""``thinwire train``: a recipe in, a trained model, its metrics and its picture out."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from thinwire.cli.advice import advised
from thinwire.cli.console import command_line
from thinwire.cli.errors import explained
from thinwire.cli.summary import shown
from thinwire.extras import require

if TYPE_CHECKING:
    from thinwire.spec.plan import Plan
    from thinwire.spec.profile import Profile
    from thinwire.spec.recipe import Recipe
    from thinwire.train.directory import RunDirectory
    from thinwire.train.environment import Started
    from thinwire.train.launching.request import RunRequest

RUNS = Path("runs")
"""Where runs without ``--out`` go."""


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="What to train; see recipes/.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|config.json",
            help="What to train, instead of the recipe's model: a Hugging Face model's directory, from its weights if "
            "it has any, or a configuration.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN.toml|preset:NAME|auto",
            help="How to shard it, instead of the recipe's plan; auto measures the cluster and chooses.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="PROFILE.json", help="With --plan auto: do not measure again.", show_default=False),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes; on one machine they are logical.", show_default=False)
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks per node.", show_default=False)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe or, as plan.KEY, of the plan."),
    ] = None,
    trace_steps: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST", help="Trace these steps into traces/ of the run, with all ranks.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            envvar="THINWIRE_OUT", help="Directory of the run; by default a new one under runs/.", show_default=False
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Begin or continue with the ranks there are: same kind of plan, same global batch."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON to stdout; progress goes to stderr.")
    ] = False,
) -> None:
    """Train a model on all ranks of this machine, or as one rank under torchrun or SLURM.

    Ctrl-C and SIGTERM save and leave; a lost rank restarts the run from its last checkpoint.

    [bold]Examples[/bold]

      thinwire train recipes/quickstart.toml

      thinwire train recipes/quickstart.toml --plan preset:zero3 --nodes 2 --nproc 2 --set train.steps=50

      thinwire train recipes/quickstart.toml --plan auto --nodes 2 --nproc 2

      thinwire train recipes/quickstart.toml --set plan.tp=2 --set plan.pp=2 --nodes 1 --nproc 4

      thinwire train recipes/quickstart.toml --out runs/quickstart --resume

      thinwire train recipes/quickstart.toml --trace-steps 10:13

      thinwire train recipes/quickstart.toml --model ~/models/qwen3

      torchrun --nproc-per-node 4 -m thinwire.cli.main train recipes/quickstart.toml --out runs/torchrun
    """
    with explained(as_json=as_json):
        require("train", "thinwire train")
        from thinwire.errors import UsageError
        from thinwire.spec.recipe import Recipe
        from thinwire.train.environment import resolve_plan, resolve_ranks, started, usable_gpus
        from thinwire.train.launching.request import RunRequest

        overrides = [*(settings or ())]
        overrides += [f"cluster.{key}={value}" for key, value in (("nodes", nodes), ("nproc", nproc)) if value]
        overrides += ["cluster.elastic=true"] if elastic else []
        if trace_steps is not None:
            overrides.append(f"train.trace_steps={json.dumps(trace_steps)}")
        chosen = Recipe.read(
            recipe,
            overrides,
            plan=None if plan == "auto" else plan,
            model=None if model is None else str(model),
        )
        ranks = started()
        directory = _directory(recipe, out, resume, ranks)
        notes: tuple[str, ...] = ()
        if chosen.cluster.elastic:
            resume = resume or directory.recipe.is_file()
            chosen, resolved, notes = _fit(chosen, directory, ranks)
        else:
            resolved = resolve_plan(chosen, ranks)
        node_ranks = resolve_ranks(chosen, ranks, usable_gpus(chosen)).local
        console = Console(stderr=as_json, quiet=ranks is not None and ranks.rank > 0, highlight=False)
        measured: Profile | None = None
        if plan == "auto":
            chosen, resolved, measured = _automatic(chosen, resolved, directory, resume, ranks, profile, console)
        elif profile is not None:
            raise UsageError(f"--profile {profile} has no use here: it goes with --plan auto")
        for note in (*(() if resume else _start(chosen)), *notes, *chosen.replaced(resolved.mesh)):
            console.print(note, markup=False, soft_wrap=True)
        request = RunRequest(chosen, resolved, directory, node_ranks, resume, "stderr" if as_json else "stdout")
        with advised(recipe, chosen, resolved, directory):
            if ranks is None:
                _launch(request, measured, console)
            else:
                _join(request, measured, console, ranks)
        if ranks is None or ranks.rank == 0:
            _finish(directory, console, as_json)


def _automatic(
    recipe: Recipe,
    resolved: Plan,
    directory: RunDirectory,
    resume: bool,
    ranks: Started | None,
    profile: Path | None,
    console: Console,
) -> tuple[Recipe, Plan, Profile | None]:
    """The recipe with the planner's plan, and the profile; a run that is continued keeps the plan it has."""
    from thinwire.cli.auto import choose_plan
    from thinwire.errors import UsageError
    from thinwire.spec.plan import Plan

    if resolved.ranks > resolved.world:
        raise UsageError(
            f"--plan auto chooses among data-parallel plans, but the recipe's plan has tp = {resolved.tp} and pp = "
            f"{resolved.pp}; leave these out, or name a plan"
        )
    before = Plan.load(directory.plan) if resume and directory.plan.exists() else None
    if before is not None and before.mesh == resolved.mesh:
        plan, measured = before, None
    else:
        plan, measured = choose_plan(recipe, resolved, ranks, profile, console)
    return recipe.with_(plan=plan.to_dict()), plan, measured


def _fit(recipe: Recipe, directory: RunDirectory, ranks: Started | None) -> tuple[Recipe, Plan, tuple[str, ...]]:
    """Recipe and plan for the ranks there are, and what that changes."""
    from thinwire.train.launching.elastic import continued

    fitted = continued(recipe, directory, ranks)
    return fitted.recipe, fitted.plan, fitted.notes


def _start(recipe: Recipe) -> list[str]:
    """What a Hugging Face model starts from, one sentence."""
    model = recipe.model
    if model.kind != "huggingface":
        return []
    source = model.path or (model.config if isinstance(model.config, str) else "the recipe")
    return [
        f"starting from the weights in {source}"
        if model.starts_from_files
        else f"starting at random, from seed {recipe.train.seed}: the configuration is that of {source}"
    ]


def _directory(recipe: Path, out: Path | None, resume: bool, ranks: Started | None) -> RunDirectory:
    from thinwire.errors import UsageError
    from thinwire.train.directory import RunDirectory

    if out is not None:
        return RunDirectory(out.resolve())
    if ranks is not None:
        # Each rank would look for a free name by itself, and not all at the same moment.
        raise UsageError(
            f"--out is missing: {ranks.by} started this rank, and all ranks need one directory; add --out DIR"
        )
    return RunDirectory(default_directory(RUNS.resolve(), recipe.stem, resume=resume))


def default_directory(parent: Path, stem: str, *, resume: bool) -> Path:
    """A run's directory where the user names none: ``parent/stem``, ``parent/stem-2`` and so on.

    Args:
        parent: of all runs.
        stem: the recipe's name.
        resume: whether to take the newest that exists instead of the first that does not.

    Returns:
        The directory.
    """
    number = 1
    newest = path = parent / stem
    while path.exists() and any(path.iterdir()):
        newest, number = path, number + 1
        path = parent / f"{stem}-{number}"
    return newest if resume else path


def _launch(request: RunRequest, profile: Profile | None, console: Console) -> None:
    """Start this machine's ranks and wait for them."""
    from thinwire.program import idle_codecs
    from thinwire.train.data.packing import prepare
    from thinwire.train.launching.launch import launch
    from thinwire.train.launching.versions import versions

    def report(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    directory, plan = request.directory, request.plan
    directory.check(resume=request.resume)
    if request.resume:
        directory.check_same(request.recipe)
    with directory.held(), directory.unless_refused():
        # Here rather than on the ranks: errors in the data are found before anything starts.
        dataset = prepare(request.recipe.data, report)
        directory.open(request.recipe, plan, versions(), command=command_line(), profile=profile)
        for line in (plan.describe(), *idle_codecs(plan)):
            report(line)
        report(
            f"{len(dataset.train):,} tokens to train on, {len(dataset.validation):,} to validate, vocabulary "
            f"{dataset.vocab:,}, unigram entropy {dataset.unigram_entropy:.3f} nats"
        )
        report(f"writing to {shown(directory.path)}")
        launch(request, report)


def _join(request: RunRequest, profile: Profile | None, console: Console, ranks: Started) -> None:
    """Be one rank of a run that someone else has started."""
    import dataclasses
    import os

    from thinwire.program import idle_codecs
    from thinwire.train.launching.versions import versions
    from thinwire.train.worker import recorded_failure, train

    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    directory, plan = request.directory, request.plan
    with recorded_failure(directory.logs), contextlib.ExitStack() as stack:
        if ranks.rank == 0:
            stack.enter_context(directory.held())
            stack.enter_context(directory.unless_refused())
            if not restarted:
                directory.check(resume=request.resume)
                if request.resume:
                    directory.check_same(request.recipe)
            directory.open(request.recipe, plan, versions(), command=command_line(), profile=profile)
            for line in (plan.describe(), *idle_codecs(plan)):
                console.print(line, markup=False, soft_wrap=True)
        train(dataclasses.replace(request, resume=request.resume or restarted), launched=False)


def _finish(directory: RunDirectory, console: Console, as_json: bool) -> None:
    """Draw, print the table, or say where an early end has left things."""
    from thinwire.cli.picture import draw_losses
    from thinwire.cli.summary import summary_table
    from thinwire.record import began, read_run

    run = read_run(directory.path)
    records = run.records
    draw_losses(records, directory)
    if not directory.summary.exists():
        step = records[-1]["step"] if records else 0
        if as_json:
            print(json.dumps({"stopped": True, "steps": step, "directory": str(directory.path)}))
        return
    summary: dict[str, Any] = json.loads(directory.summary.read_text())
    if as_json:
        print(json.dumps(summary))
    console.print(summary_table(summary, records, began(run.starts), directory))

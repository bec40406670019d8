"""``thinwire sim --memory``: the memory that a rank needs, before launch, under plans and in other systems."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.former import say_moved
from thinwire.cli.terminal.options import Seq, expand_options
from thinwire.report import Sheet, print_sheet
from thinwire.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thinwire.cost import Memory
    from thinwire.spec import ClusterSpec, ModelSpec, Plan
    from thinwire.spec.recipe import Recipe


@dataclass(frozen=True)
class MemoryOptions:
    """The options of ``thinwire memory``."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A published shape such as llama-7b, a recipe, a TOML file, or a Hugging Face config."
        ),
    ]
    cluster: Annotated[
        str, typer.Option(metavar="GPU:NODESxGPUS|FILE", help="Cluster: h100-80g:4x8, for example, or a TOML file.")
    ]
    plan: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A preset or a plan file; may be repeated. By default every preset, and the plan of a recipe.",
        ),
    ] = None
    seq: Seq = None
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per micro-batch.")] = 1
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute blocks in the backward.")] = False
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help='Memory of a GPU, for example "80GiB".')] = None
    peers: Annotated[bool, typer.Option(help="Estimate DDP, FSDP2 and DeepSpeed's ZeRO, too.")] = True
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False


@dataclass(frozen=True)
class _Estimate:
    """The memory of one rank under one plan or in one system."""

    system: str
    label: str
    memory: Memory


@expand_options
def memory(options: MemoryOptions) -> None:
    """Estimate the memory of a rank before launch, as thinwire sim --memory does."""
    with explained(as_json=options.as_json):
        say_moved("thinwire memory MODEL", "thinwire sim --memory --model MODEL")
        show_memory(options, {} if options.memory is None else {"memory": options.memory})


def show_memory(options: MemoryOptions, changes: Mapping[str, Any]) -> None:
    """Show the memory of a rank: for plans, and for DDP, FSDP2 and ZeRO 1 to 3 with the same model."""
    from thinwire.cli.planning.job import changed_cluster
    from thinwire.spec import ClusterSpec

    cluster = changed_cluster(ClusterSpec.named(options.cluster), changes)
    recipe = _recipe(options.model)
    model = _shape(options, recipe)
    own = _own_plans(options, recipe, cluster)
    options = _with_batch(options, own)
    estimates = [*_of_plans(options, own, model, cluster), *_of_peers(options, model, cluster)]
    estimates.sort(key=lambda estimate: estimate.memory.total)
    console = wide_console(as_json=options.as_json)
    console.print(_introduction(options, model, cluster))
    print_sheet(console, _sheet(estimates, cluster))
    if options.as_json:
        print(json.dumps(_to_json(estimates, model, cluster)))


def _recipe(source: str) -> Recipe | None:
    """The recipe that ``MODEL`` names, if it is one."""
    from thinwire.spec.io import read_toml_file
    from thinwire.spec.recipe import Recipe

    is_recipe = source.endswith(".toml") and Path(source).exists() and "train" in read_toml_file(source)
    return Recipe.read(source) if is_recipe else None


def _shape(options: MemoryOptions, recipe: Recipe | None) -> ModelSpec:
    from thinwire.spec import ModelSpec

    changes = {} if options.seq is None else {"seq": options.seq}
    if recipe is None:
        return ModelSpec.named(options.model, **changes)
    vocab = recipe.model.vocab or recipe.data.vocab or 4096
    shape = recipe.model.shape(vocab=vocab, seq=recipe.train.seq)
    return shape.with_(seq=options.seq or recipe.train.seq)


def _own_plans(options: MemoryOptions, recipe: Recipe | None, cluster: ClusterSpec) -> dict[str, Plan]:
    """The plans that have a batch of their own, as they are: those of files, and of the recipe."""
    from thinwire.spec import Plan
    from thinwire.spec.factor import Factor
    from thinwire.spec.template import PlanTemplate

    if options.plan is not None:
        return {name: Plan.load(name) for name in options.plan if name.endswith(".toml")}
    if recipe is None:
        return {}
    template = PlanTemplate.read(recipe)
    ranks = Factor(local=cluster.gpus_per_node, nodes=cluster.nodes)
    mesh = ranks.data_parallel(*template.model_parallel)
    return {"the recipe's": template.fitted(mesh).resolve(mesh)}


def _with_batch(options: MemoryOptions, own: Mapping[str, Plan]) -> MemoryOptions:
    """The options, with the batch that these plans share unless the options have one, so that all rows share it."""
    batches = {(plan.micro_batch, plan.micro_batches, plan.recompute) for plan in own.values()}
    if len(batches) != 1 or (options.micro_batch, options.micro_batches, options.recompute) != (1, 1, False):
        return options
    ((micro_batch, micro_batches, recompute),) = batches
    return replace(options, micro_batch=micro_batch, micro_batches=micro_batches, recompute=recompute)


def _of_plans(
    options: MemoryOptions, own: Mapping[str, Plan], model: ModelSpec, cluster: ClusterSpec
) -> Iterator[_Estimate]:
    """Estimates of presets, and of plans with a batch of their own."""
    from thinwire.cost import OVERHEAD, largest_memory
    from thinwire.spec import Plan

    presets = [name for name in options.plan or Plan.preset_names() if name not in own]
    for label, plan in {**own, **{name: _preset(name, options, cluster) for name in presets}}.items():
        needed = largest_memory(model, plan, seq=model.seq, overhead=OVERHEAD)
        yield _Estimate("thinwire", label, needed)


def _preset(name: str, options: MemoryOptions, cluster: ClusterSpec) -> Plan:
    """A preset on the cluster's mesh, with the batch of the options."""
    from thinwire.spec import Plan

    return Plan.preset(
        name.removeprefix("preset:"),
        nodes=cluster.nodes,
        local=cluster.gpus_per_node,
        compute_dtype=cluster.compute_dtype,
        micro_batch=options.micro_batch,
        micro_batches=options.micro_batches,
        recompute=options.recompute,
    )


def _of_peers(options: MemoryOptions, model: ModelSpec, cluster: ClusterSpec) -> Iterator[_Estimate]:
    """Estimates of other systems, on all ranks of the cluster."""
    from thinwire.cost import PEER_SYSTEMS, peer_memory

    names = {"ddp": ("PyTorch", "DDP, autocast"), "fsdp2": ("PyTorch", "FSDP2")}
    for system in PEER_SYSTEMS if options.peers else ():
        maker, label = names.get(system, ("DeepSpeed", f"ZeRO-{system[-1]}"))
        needed = peer_memory(system, model, _preset("ddp", options, cluster))
        yield _Estimate(maker, label, needed)


def _introduction(options: MemoryOptions, model: ModelSpec, cluster: ClusterSpec) -> str:
    recomputed = ", blocks recomputed" if options.recompute else ""
    return (
        f"{model.name or options.model}: {model.parameters / 1e9:.2f} billion parameters; {options.micro_batch} x "
        f"{model.seq:,} tokens a micro-batch{recomputed}; {cluster.name or options.cluster}: {cluster.gpus:,} GPUs of "
        f"{format_bytes(cluster.memory)}"
    )


def _sheet(estimates: list[_Estimate], cluster: ClusterSpec) -> Sheet:
    rows = []
    for estimate in estimates:
        needed = estimate.memory
        parts = (
            needed.params,
            needed.grads,
            needed.optimizer,
            needed.secondary + needed.gathered,
            needed.buffers + needed.feedback,
            needed.activations + needed.logits,
            needed.overhead,
            needed.total,
        )
        notes = [f"and {needed.host / 2**30:.2f} of the host"] if needed.host else []
        notes += [] if needed.total <= cluster.memory else ["does not fit"]
        rows.append([estimate.system, estimate.label, *(f"{part / 2**30:.2f}" for part in parts), ", ".join(notes)])
    columns = ["system", "plan", "P", "G", "OS", "gathered", "buffers", "activations", "overhead", "total", ""]
    return Sheet("Peak memory of a rank in GiB, least first", columns, 2, rows)


def _to_json(estimates: list[_Estimate], model: ModelSpec, cluster: ClusterSpec) -> dict[str, Any]:
    return {
        "parameters": model.parameters,
        "gpu_memory_bytes": cluster.memory,
        "estimates": [
            {
                "system": estimate.system,
                "plan": estimate.label,
                "memory_bytes": {**estimate.memory.by_part(), "total": estimate.memory.total},
                **({"host_bytes": estimate.memory.host} if estimate.memory.host else {}),
                "fits": estimate.memory.total <= cluster.memory,
            }
            for estimate in estimates
        ],
    }

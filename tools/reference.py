"""Generates the reference pages of plans, recipes, models and clusters from the types, so that they always match.

``python tools/reference.py docs``
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from thinwire import units
from thinwire.sim.cases import Case
from thinwire.sim.disturbed import Disturbance
from thinwire.spec.base import LARGEST, Spec, nested, rules
from thinwire.spec.codec import NOTATION, CodecSpec
from thinwire.spec.factor import Factor
from thinwire.spec.io import Inline, write_toml
from thinwire.spec.machines.accelerators import ACCELERATORS
from thinwire.spec.machines.cluster import ClusterSpec, Links
from thinwire.spec.machines.nodes import Failures, Link, NodeGroup, Spot
from thinwire.spec.models.model import ModelSpec
from thinwire.spec.plan import Overlap, Plan, UnitOverride, Wire
from thinwire.spec.plan_parts.islands import Islands, OuterOptimizer
from thinwire.spec.plan_parts.policy import POLICIES
from thinwire.spec.plan_parts.presets import PRESETS
from thinwire.spec.plan_parts.residence import Frozen, Residence
from thinwire.spec.recipe import (
    AverageRecipe,
    CheckpointRecipe,
    ClusterRecipe,
    DataRecipe,
    LossScaleRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PublishRecipe,
    Recipe,
    TrainRecipe,
)

_QUANTITIES = {
    units.parse_bytes: 'size, `"25MiB"` or bytes',
    units.parse_bandwidth: 'bandwidth, `"200mbit"` or bits per second',
    units.parse_duration: 'duration, `"5us"` or seconds',
}
_PLAIN = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", CodecSpec: "codec"}

_EXAMPLE = """\
mesh = { local = 8, nodes = 4 }         # 4 nodes of 8 ranks
params = { local = 1, nodes = 1 }       # every rank holds all parameters
grads = { local = 1, nodes = 1 }
optimizer = { local = 8, nodes = 1 }    # optimizer states are shared by the ranks of a node
micro_batches = 4

[overlap]
spread = false                          # wait for the updated parameters before the next step

[wire]
reduce_inter = "int4:256"               # gradients cross nodes as 4-bit integers
error_feedback = true
"""

UNLIKE = """\
name = "two generations"

[links]
zone = { bandwidth = "10gbit", latency = "2ms" }      # for each node of a zone

[failures]
mtbf = "2000h"                                        # of one node
restart = "8min"
checkpoint = "20s"

[[groups]]
name = "new"
nodes = 2
accelerator = "h100-80g"                              # published figures
zone = "east"
price_per_gpu_hour = 4.0

[[groups]]
name = "old"
nodes = 2
accelerator = "a100-80g"
nic = { bandwidth = "400gbit", latency = "10us" }     # other than published
zone = "west"
price_per_gpu_hour = 1.5
spot = { discount = 0.6, interruptions_per_hour = 0.02, replacement = "5min" }
"""


def plan_reference() -> str:
    """The reference of :class:`~thinwire.spec.Plan` as Markdown."""
    sections = [
        "# Plan reference",
        "Generated from the types by `make docs`; do not edit. [Concepts](concepts.md) explains the nouns.",
        "A plan is a TOML file, or `thinwire.Plan` in Python. Four keys are required; every other has a "
        "default. thinwire reports all problems of a plan at once.",
        f"```toml\n{_EXAMPLE}```",
        "## Keys",
        _fields(Plan),
        "## [tuning]",
        "Sizes and depths of gathers, reductions and buckets. The planner writes them.",
        _fields(Plan, "tuning"),
        _titled("## Factor", Factor, 'In TOML, write `{ local = 8, nodes = 4 }` or the text `"8x4"`.'),
        _titled("## [overlap]", Overlap),
        _titled("## [residence]", Residence),
        _titled("## [frozen]", Frozen),
        _titled("## [wire]", Wire),
        _titled("## [islands]", Islands),
        _titled("## [islands.outer]", OuterOptimizer),
        _titled("## [[units]]", UnitOverride),
        "## Rules",
        _rules(Plan, Wire, Islands, OuterOptimizer),
        "## Codecs",
        _table(("codec", "meaning"), ((f"`{text}`", meaning) for text, meaning in NOTATION)),
        "You can combine options: `int4:256,hadamard,stochastic`.",
        "## Policies",
        "`wire.policy` chooses all codecs with one name. RATE, A and B are bits per value. Where the only reduction of "
        "gradients leads to the owners of optimizer states, as with `zero1` and `zero2`, it has the codecs of the last "
        "column.",
        _policies(),
        "## Presets",
        "Use `Plan.preset(name, nodes=4, local=8)`, or `preset:NAME` on the command line. Presets scale with the "
        "mesh; the table shows the factors for 4 nodes of 8 ranks. If the column `group` says `yes`, `group=` sets "
        "the factor within which the preset shards, instead of the node. If it says `secondary`, `group=` sets the "
        'secondary factor. `engine = "amsp"` beside a preset performs its factors as '
        "[AMSP's engine](publications.md#amsps-objective) does.",
        _presets(Factor(local=8, nodes=4)),
    ]
    return "\n\n".join(sections) + "\n"


def recipe_reference() -> str:
    """The reference of :class:`~thinwire.spec.recipe.Recipe` as Markdown."""
    tables: dict[str, type[Spec]] = {
        "model": ModelRecipe,
        "data": DataRecipe,
        "train": TrainRecipe,
        "optimizer": OptimizerRecipe,
        "average": AverageRecipe,
        "loss_scale": LossScaleRecipe,
        "checkpoint": CheckpointRecipe,
        "publish": PublishRecipe,
        "cluster": ClusterRecipe,
    }
    sections = [
        "# Recipe reference",
        "Generated from the types by `make docs`; do not edit.",
        "A recipe is the TOML file that `thinwire train` reads. It describes the whole run. `--set KEY=VALUE` changes "
        "any key for one run, for example `--set train.steps=50`, or a key of the plan, `--set "
        "plan.wire.gather=int8:256`. Relative paths are relative to the recipe file. thinwire reports all problems of "
        "a recipe at once.",
        "## Keys",
        _fields(Recipe),
        "The [plan reference](plan-reference.md) lists the keys of a plan. In a recipe, `compute_dtype` may also be "
        '`"auto"`.',
        *(_titled(f"## [{key}]", spec) for key, spec in tables.items()),
    ]
    return "\n\n".join(sections) + "\n"


def cluster_reference() -> str:
    """The reference of models and clusters, as ``--model`` and ``--cluster`` take them, as Markdown."""
    sections = [
        "# Models and clusters",
        "Generated from the types by `make docs`; do not edit.",
        "The options `--model` and `--cluster` of `thinwire plan` and `thinwire sim` accept a name, or a TOML file "
        "with these keys.",
        _titled("## Model", ModelSpec, "`--model` also accepts a Hugging Face `config.json`, or its directory."),
        "## Models by name",
        _models(),
        _titled("## Cluster", ClusterSpec),
        "This file describes two generations of nodes in two zones:",
        f"```toml\n{UNLIKE}```",
        _titled("## [links]", Links),
        _titled("## Link", Link, 'In TOML, write `{ bandwidth = "200gbit", latency = "5us" }`.'),
        _titled("## [[groups]]", NodeGroup),
        _titled("## [spot]", Spot),
        _titled("## [failures]", Failures),
        "## Rules",
        _rules(ModelSpec, ClusterSpec),
        "## Accelerators",
        "Use `--cluster NAME:NODESxGPUS`, for example `a800-80g:128x8`. The figures are published peaks. The share "
        "that software reaches is [assumed or measured](planner.md#what-the-figures-rest-on).",
        _accelerators(),
        "## A step to simulate",
        "`thinwire sim` takes these by its options, by `--set`, and [in a file](planner.md#simulate-any-step).",
        _fields(Case),
        "Beside these, `--set` takes what slows some ranks down:",
        _fields(Disturbance),
    ]
    return "\n\n".join(sections) + "\n"


PAGES = {
    "plan-reference.md": plan_reference,
    "recipe-reference.md": recipe_reference,
    "cluster-reference.md": cluster_reference,
}
"""Function that generates each page, by file name in ``docs``."""


def _titled(title: str, spec: type[Spec], note: str = "") -> str:
    parts = [title, (inspect.getdoc(spec) or "").replace("``", "`"), note, _fields(spec)]
    return "\n\n".join(part for part in parts if part)


def _fields(spec: type[Spec], table: str = "") -> str:
    """The keys of a specification in a file, or those in one of the tables that only files have."""
    rows = []
    for field_name, field in spec.model_fields.items():
        inside, _, name = spec.file_keys.get(field_name, field_name).rpartition(".")
        if inside != table:
            continue
        kind = _type_text(field.annotation, field.metadata)
        rows.append((f"`{name}`", kind, _default_text(field), (field.description or "").replace("``", "`")))
    return _table(("key", "type", "default", "meaning"), rows)


def _type_text(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_text(
            arguments[0], [limit for item in arguments[1:] for limit in getattr(item, "metadata", [item])]
        )
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_text(item, metadata) for item in arguments if item is not type(None))
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin is tuple:
        number = "list" if arguments[-1] is Ellipsis else f"list of {len(arguments)}"
        return f"{number}: {_type_text(arguments[0], ())}"
    if origin is dict:
        return "table"
    for item in metadata:
        if isinstance(item, BeforeValidator) and item.func in _QUANTITIES:
            return _QUANTITIES[item.func]
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return "factor" if annotation is Factor else "table"
    return _PLAIN[annotation] + _limits(metadata)


def _limits(metadata: Sequence[Any]) -> str:
    limits = [f"at least {item.ge}" for item in metadata if isinstance(item, annotated_types.Ge)]
    limits += [f"above {item.gt}" for item in metadata if isinstance(item, annotated_types.Gt)]
    most = [item.le for item in metadata if isinstance(item, annotated_types.Le)]
    limits += [f"at most {le}" for le in most if le != LARGEST]  # which only keeps nonsense out
    return f", {', '.join(limits)}" if limits else ""


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if default == () or (isinstance(default, Spec) and nested(field.annotation) is not Factor):
        return "empty" if default == () else "see below"
    if isinstance(default, dict | tuple):
        return f"`{_inline(default)}`"
    if any(isinstance(item, BeforeValidator) and item.func is units.parse_bytes for item in field.metadata):
        return units.format_bytes(default)
    return f'`"{default}"`' if isinstance(default, str | CodecSpec) else f"`{default}`"


def _inline(value: Any) -> str:
    """A default value in TOML on one line."""
    return write_toml({"value": Inline(value) if isinstance(value, dict) else value}).removeprefix("value = ").strip()


def _rules(*specs: type[Spec]) -> str:
    return "\n".join(f"- {_rule_text(check)}" for spec in specs for check in rules(spec))


def _rule_text(check: Any) -> str:
    return " ".join((inspect.getdoc(check) or "").split()).replace("``", "`")


def _policies() -> str:
    rows = ((f"`{name}`", *(f"`{codec}`" for codec in codecs)) for name, codecs in POLICIES.items())
    return _table(("policy", "gather, spread, tp, pp, ep, cp", "scatter", "reduce_intra, reduce_inter"), rows)


def _presets(mesh: Factor) -> str:
    rows = []
    for name, preset in PRESETS.items():
        plan = Plan.preset(name, nodes=mesh.nodes, local=mesh.local)
        group = "secondary" if preset.has_secondary else "yes" if preset.takes_group else ""
        factors = (str(factor) for factor in (plan.params, plan.grads, plan.optimizer, plan.secondary or ""))
        rows.append((f"`{name}`", *factors, group, preset.summary))
    return _table(("preset", "P", "G", "OS", "secondary", "group", "what it is"), rows)


def _models() -> str:
    rows = []
    for name in ModelSpec.preset_names():
        model = ModelSpec.preset(name)
        dimensions = (model.kind, model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab)
        rows.append((f"`{name}`", *map(str, dimensions), str(model.seq), f"{model.parameters / 1e9:.1f}"))
    head = ("name", "kind", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "10^9 parameters")
    return _table(head, rows)


def _accelerators() -> str:
    rows = [
        (
            f"`{name}`",
            units.format_bytes(kind.memory),
            f"{kind.peak_flops['float16'] / 1e12:.0f}",
            units.format_bandwidth(kind.inside),
            units.format_bandwidth(kind.nic),
            str(kind.gpus_per_node),
            kind.summary,
        )
        for name, kind in ACCELERATORS.items()
    ]
    head = ("name", "memory", "peak TFLOP/s, 16 bits", "inside a node", "from a node", "GPUs of a node", "what it is")
    return _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    for name, written in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(written(), encoding="utf-8")

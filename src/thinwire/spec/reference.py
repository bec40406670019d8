"""Writes the plan reference from the types, so that documentation cannot drift from what is accepted.

``python -m thinwire.spec.reference docs/plan-reference.md``
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
from thinwire.spec.base import Spec, nested, rules
from thinwire.spec.codec import NOTATION, CodecSpec
from thinwire.spec.factor import Factor
from thinwire.spec.plan import Overlap, Plan, Residence, UnitOverride, Wire
from thinwire.spec.policy import POLICIES
from thinwire.spec.presets import PRESETS

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


def plan_reference() -> str:
    """The reference of :class:`~thinwire.spec.Plan` as Markdown."""
    sections = [
        "# Plan reference",
        "Generated from the types by `make docs`; do not edit. [Concepts](concepts.md) explains the nouns.",
        "A plan is a TOML file, or `thinwire.Plan` in Python. Four keys are required; every other has a "
        "default. Everything that is wrong with a plan is reported at once.",
        f"```toml\n{_EXAMPLE}```",
        "## Keys",
        _fields(Plan),
        _titled("## Factor", Factor, 'In TOML `{ local = 8, nodes = 4 }`; the text `"8x4"` means the same.'),
        _titled("## [overlap]", Overlap),
        _titled("## [wire]", Wire),
        _titled("## [residence]", Residence),
        _titled("## [[units]]", UnitOverride),
        "## Rules",
        "\n".join(f"- {_rule_text(check)}" for spec in (Plan, Wire) for check in rules(spec)),
        "## Codecs",
        _table(("codec", "meaning"), ((f"`{text}`", meaning) for text, meaning in NOTATION)),
        "Options may be combined: `int4:256,hadamard,stochastic`.",
        "## Policies",
        "`wire.policy` chooses all six codecs by one name; RATE, A and B are bits per value.",
        _policies(),
        "## Presets",
        "`Plan.preset(name, nodes=4, local=8)`, or `preset:NAME` on the command line. The factors below are "
        "those of 4 nodes of 8 ranks; presets take the mesh and scale with it. Where the column says so, "
        "`group=` replaces the node as the factor within which a preset shards, or as its secondary factor.",
        _presets(Factor(local=8, nodes=4)),
    ]
    return "\n\n".join(sections) + "\n"


def _titled(title: str, spec: type[Spec], note: str = "") -> str:
    parts = [title, (inspect.getdoc(spec) or "").replace("``", "`"), note, _fields(spec)]
    return "\n\n".join(part for part in parts if part)


def _fields(spec: type[Spec]) -> str:
    rows = []
    for name, field in spec.model_fields.items():
        kind = _type_text(field.annotation, field.metadata)
        rows.append((f"`{name}`", kind, _default_text(field), field.description or ""))
    return _table(("key", "type", "default", "meaning"), rows)


def _type_text(annotation: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_text(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_text(item, metadata) for item in arguments if item is not type(None))
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin is tuple:
        return f"list: {_type_text(arguments[0], ())}"
    for item in metadata:
        if isinstance(item, BeforeValidator) and item.func in _QUANTITIES:
            return _QUANTITIES[item.func]
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return "factor" if annotation is Factor else "table"
    return _PLAIN[annotation] + _limits(metadata)


def _limits(metadata: Sequence[Any]) -> str:
    limits = [f"at least {item.ge}" for item in metadata if isinstance(item, annotated_types.Ge)]
    limits += [f"at most {item.le}" for item in metadata if isinstance(item, annotated_types.Le)]
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
    if any(isinstance(item, BeforeValidator) and item.func is units.parse_bytes for item in field.metadata):
        return units.format_bytes(default)
    return f'`"{default}"`' if isinstance(default, str | CodecSpec) else f"`{default}`"


def _rule_text(check: Any) -> str:
    return " ".join((inspect.getdoc(check) or "").split()).replace("``", "`")


def _policies() -> str:
    rows = ((f"`{name}`", f"`{dense}`", f"`{gradients}`") for name, (dense, gradients) in POLICIES.items())
    return _table(("policy", "gather, spread, tp, pp", "reduce_intra, reduce_inter"), rows)


def _presets(mesh: Factor) -> str:
    rows = []
    for name, preset in PRESETS.items():
        plan = Plan.preset(name, nodes=mesh.nodes, local=mesh.local)
        group = "secondary" if preset.has_secondary else "yes" if preset.takes_group else ""
        factors = (str(factor) for factor in (plan.params, plan.grads, plan.optimizer, plan.secondary or ""))
        rows.append((f"`{name}`", *factors, group, preset.summary))
    return _table(("preset", "P", "G", "OS", "secondary", "group", "what it is"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(plan_reference(), encoding="utf-8")
    else:
        sys.stdout.write(plan_reference())

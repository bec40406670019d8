"""Converts the arguments of PyTorch's ``fully_shard`` (FSDP2), as the text of the call or as a table."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

from thinwire.convert.outcome import ON_HOST, PARAMS_ON_HOST, Conversion, Judgement, ignored, mapped, refused
from thinwire.convert.source import Rules, Source, because, flag, judge, named, to_plan
from thinwire.errors import SpecError
from thinwire.spec import Factor

_DTYPES: Final = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
_CALLS: Final[Mapping[str, tuple[str, ...]]] = {
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
    "CPUOffloadPolicy": ("pin_memory",),
    "OffloadPolicy": (),
    "init_device_mesh": ("device_type", "mesh_shape"),
    "DataParallelMeshDims": ("shard", "replicate"),
}
"""Parameters that an argument of each call may have by position."""

_SHOWN: Final = "fully_shard(mesh=..., reshard_after_forward=..., mp_policy=MixedPrecisionPolicy(...))"


def from_fsdp2(arguments: str | Mapping[str, Any], ranks: Factor, what: str = "fully_shard") -> Conversion:
    """Convert the arguments of ``fully_shard``.

    Args:
        arguments: The text of a call, ``fully_shard(model, reshard_after_forward=8, mp_policy=...)``, or its keyword
            arguments; ``mesh`` is a list of sizes, ``mp_policy`` a table of dtypes.
        ranks: Ranks of a node, and nodes.
        what: Name of the source, for messages.

    Returns:
        The conversion, with one row for each argument.

    Raises:
        SpecError: The text is no call of ``fully_shard`` with constant arguments.
    """
    table = parse_call(arguments) if isinstance(arguments, str) else dict(arguments)
    source = Source(table, ranks)
    base = {**_factors(source), "compute_dtype": "float32"}
    return Conversion(what, ranks, base, judge(source, _RULES))


def parse_call(call: str) -> dict[str, Any]:
    """Parse the text of a call of ``fully_shard`` without evaluating it.

    Args:
        call: The text; the first positional argument, the module, is left out of the result.

    Returns:
        Keyword arguments as plain values: a mesh as a list of sizes, a policy as a table, a dtype as its name.

    Raises:
        SpecError: The text is no such call, or an argument is not a constant.
    """
    try:
        return _parsed(call)
    except (MemoryError, RecursionError):
        raise SpecError("--fsdp2", f"is nested too deeply; expected {_SHOWN}") from None


def _parsed(call: str) -> dict[str, Any]:
    try:
        node = ast.parse(call.strip(), mode="eval").body
    except SyntaxError as error:
        raise SpecError("--fsdp2", f"{call!r} is not Python: {error.msg}; expected {_SHOWN}") from error
    if not isinstance(node, ast.Call) or _name(node.func) != "fully_shard":
        raise SpecError("--fsdp2", f"{call!r} is no call of fully_shard; expected {_SHOWN}")
    arguments = _arguments(node, ("module",))
    return {key: _value(key, value) for key, value in arguments.items() if key != "module"}


def resharding(value: Any, ranks: Factor) -> Judgement:
    """Judge ``reshard_after_forward``: true, false, or the number of ranks that keep a secondary shard."""
    one = Factor()
    if value is True:
        return mapped(plan={"params": ranks}, note="the default")
    if value is False:
        return mapped(plan={"params": one}, note="zero2: parameters are whole at all times")
    if not isinstance(value, int) or value < 1 or ranks.ranks % value:
        return refused(f"expected true, false, or a divisor of the {ranks.ranks} ranks that shard")
    if value == 1:
        return mapped(plan={"params": one}, note="one rank keeps everything, as with false")
    group = ranks.group(value)
    if group is None:
        return refused(f"a group of {value} ranks does not fill nodes of {ranks.local}")
    return mapped(plan={"secondary": group}, note="preset hpz")


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _value(key: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and (name := _name(node.func)) in _CALLS:
        arguments = _arguments(node, _CALLS[name])
        if name == "init_device_mesh":
            return _mesh_sizes(arguments)
        values = {argument: _value(f"{key}.{argument}", value) for argument, value in arguments.items()}
        return {"cpu": True} if name == "CPUOffloadPolicy" else values
    if _name(node) in _DTYPES:
        return _name(node)
    try:
        value = ast.literal_eval(node)
        json.dumps(value)  # not a set, say: rows show values as JSON
    except (TypeError, ValueError):
        shown = ast.unparse(node)
        raise SpecError(
            "--fsdp2", f"{key} = {shown} is no constant; write its value, or leave it out: expected {_SHOWN}"
        ) from None
    return value


def _arguments(node: ast.Call, by_position: tuple[str, ...]) -> dict[str, ast.expr]:
    """The arguments of a call by the names of its parameters, of which some may be given by position."""
    name = _name(node.func)
    if len(node.args) > len(by_position) or any(keyword.arg is None for keyword in node.keywords):
        raise SpecError("--fsdp2", f"{name} takes {', '.join(by_position) or 'nothing'} by position, and keywords")
    given = [*zip(by_position, node.args, strict=False), *((str(word.arg), word.value) for word in node.keywords)]
    if len(dict(given)) < len(given):
        raise SpecError("--fsdp2", f"{name} is given an argument more than once")
    return dict(given)


def _mesh_sizes(arguments: Mapping[str, ast.expr]) -> list[int]:
    """The sizes in ``init_device_mesh("cuda", (2, 8))``."""
    sizes = arguments.get("mesh_shape")
    try:
        value = None if sizes is None else ast.literal_eval(sizes)
    except (TypeError, ValueError):
        value = None
    if not isinstance(value, tuple | list):
        raise SpecError("--fsdp2", 'mesh: expected init_device_mesh("cuda", (2, 8)) with constant sizes')
    return list(value)


def _group(source: Source) -> Factor | None:
    """The ranks that shard: all, or under a mesh of two axes those of its second one; None where they do not fit."""
    sizes = source.get("mesh")
    return source.ranks.group(sizes[1]) if _is_mesh(sizes) and len(sizes) == 2 else source.ranks


def _factors(source: Source) -> dict[str, Any]:
    group = _group(source) or source.ranks
    return {"name": "fsdp2", "mesh": source.ranks, "params": group, "grads": group, "optimizer": group}


def _is_mesh(value: Any) -> bool:
    if not isinstance(value, list) or len(value) not in (1, 2):
        return False
    return all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)


def _mesh(value: Any, source: Source) -> Judgement:
    if not _is_mesh(value):
        return refused("expected one size, or two for HSDP: replicas and the ranks that shard")
    product = value[0] * (value[1] if len(value) == 2 else 1)
    if product != source.ranks.ranks:
        return refused(f"makes {product} ranks, but --nodes and --nproc make {source.ranks.ranks}")
    group = _group(source)
    if group is None:
        return refused(f"{value[-1]} ranks are no whole nodes of {source.ranks.local}, and no divisor of a node")
    # reshard_after_forward has a say in params; without it, the base has them.
    return mapped(plan={"grads": group, "optimizer": group}, note="hsdp" if len(value) == 2 else "")


def _reshard(value: Any, source: Source) -> Judgement:
    return resharding(value, _group(source) or source.ranks)


def offloading(value: Any, _source: Source) -> Judgement:
    """What becomes of offloaded states, or of none."""
    if not value:
        return ignored("nothing is offloaded")
    return mapped(
        plan={**ON_HOST, **PARAMS_ON_HOST}, note="the update runs on the device, through which the states pass"
    )


_RULES: Final[Rules] = {
    "mesh": _mesh,
    "reshard_after_forward": _reshard,
    "shard_placement_fn": because("shards are slices of a unit's flat buffer, and parameters keep their whole shape"),
    "mp_policy": {
        "param_dtype": named(to_plan("compute_dtype"), _DTYPES),
        "reduce_dtype": named(to_plan("reduce_dtype"), _DTYPES),
        "output_dtype": because("outputs have the compute dtype"),
        "cast_forward_inputs": flag(
            lambda value, source: (
                ignored("inputs of units are always cast")
                if value
                else refused("inputs of units are always cast; cast them back in the module, or leave it out")
            )
        ),
    },
    "offload_policy": offloading,
    "ignored_params": because("call tw.ignore(parameter) before tw.shard; a recipe shards all parameters"),
    "dp_mesh_dims": because("a plan contains data-parallel ranks only"),
}

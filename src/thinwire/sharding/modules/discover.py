"""Chooses the modules that become units, and assigns parameters to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from thinwire.errors import UsageError
from thinwire.program.shares import LARGE_LEAF
from thinwire.sharding.modules.quantized import inner_tensors

Selection = Sequence[nn.Module | str] | Callable[[str, nn.Module], bool] | None


_IGNORED = "_thinwire_ignored"
"""Attribute of a parameter that sharding leaves alone."""


def ignore(*parameters: nn.Parameter) -> None:
    """Exclude parameters from :func:`thinwire.shard`, like ``ignored_params`` of FSDP2.

    They stay plain tensors on every rank. They are not gathered, combined over ranks, or saved, and each rank keeps its
    own gradients.

    Args:
        *parameters: Parameters of a model that is not sharded yet.

    Raises:
        UsageError: An argument is no such parameter.
    """
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter) or hasattr(parameter, "live"):  # as shares have it
            raise UsageError(
                f"tw.ignore takes parameters of a model that is not sharded yet, not {type(parameter).__name__}: call "
                "tw.ignore(*module.parameters()) before tw.shard"
            )
        object.__setattr__(parameter, _IGNORED, True)


def is_ignored(parameter: torch.Tensor) -> bool:
    """Whether sharding leaves a parameter alone."""
    return hasattr(parameter, _IGNORED)


@dataclass
class UnitModules:
    """A module that becomes a unit.

    Attributes:
        name: Dotted name of the module; empty for the root.
        module: Module whose forward and backward drive the unit.
        block: Number of the block that the unit is or belongs to. A unit outside of blocks has a number of its own.
        list_element: Name of the block that the unit is or belongs to: an element of a module list, or a selected
            module. Empty outside of blocks. Activation recomputation covers whole blocks.
        parameters: ``(name, parameter)`` pairs that the unit owns; names as in the model. Of a wrapper, its inner
            tensors.
    """

    name: str
    module: nn.Module
    block: int
    list_element: str
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def discover(
    model: nn.Module,
    selection: Selection,
    granularity: str,
    exceptions: Callable[[str], str | None] = lambda _name: None,
) -> list[UnitModules]:
    """Cut a model into units.

    By default, every element of a module list or sequence that holds parameters is a unit, and so is every large leaf
    outside them (embedding, head). The root takes the rest. ``granularity = "module"`` cuts further, down to the
    leaves. A module with the exception ``"block"`` is not cut and gathers whole, like DeepSpeed's leaf modules.
    Parameters that several units share belong to the unit of their nearest common ancestor. So do parameters of modules
    that are never called (a parameter list, the elements of a list of lists).

    Args:
        model: The model.
        selection: Modules or their names, or a predicate on ``(name, module)``; ``None`` selects the default blocks.
        granularity: ``"block"`` or ``"module"``.
        exceptions: Returns the granularity of the block or module with a given name, or ``None`` if there is no
            exception. The empty name stands for everything outside of blocks.

    Returns:
        Units with at least one parameter, in registration order; the root comes first, if it owns any.

    Raises:
        UsageError: A selected module is not part of the model, or is never called.
    """
    blocks = _selected(model, selection) if selection is not None else _default_blocks(model)
    units = _cut(model, blocks, granularity, exceptions, with_large_leaves=selection is None)
    _assign_parameters(model, units)
    return [unit for unit in units if unit.parameters]


def _selected(model: nn.Module, selection: Selection) -> list[tuple[str, nn.Module]]:
    assert selection is not None
    by_name = dict(model.named_modules())
    by_module = {module: name for name, module in by_name.items()}
    if callable(selection) and not isinstance(selection, type):  # a call of a class would make a module
        selection = [name for name, module in by_name.items() if name and selection(name, module)]
    blocks = []
    for wanted in [selection] if callable(selection) else selection:
        name = wanted if isinstance(wanted, str) else by_module.get(wanted)
        if name is None or name not in by_name:
            raise UsageError(
                f"units: {wanted!r} is not a module of the model; give modules or names from model.named_modules(), or "
                "a predicate, such as lambda name, module: isinstance(module, Block)"
            )
        if name and not _is_called(by_name[name]):
            raise UsageError(
                f"units: {name!r} is a {type(by_name[name]).__name__}, which is never called, so that nothing would "
                "gather it; give the modules inside it"
            )
        blocks.append((name, by_name[name]))
    order = list(by_name)
    return sorted(blocks, key=lambda item: order.index(item[0]))


def _default_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Elements of the outermost module lists and sequences; for lists of lists, the elements of the inner lists."""
    blocks: list[tuple[str, nn.Module]] = []

    def walk(prefix: str, module: nn.Module, *, listed: bool) -> None:
        listed = isinstance(module, nn.ModuleList | nn.Sequential) or (listed and not _is_called(module))
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if not listed or not _is_called(child):
                walk(path, child, listed=listed)
            elif _owns_any(child):
                blocks.append((path, child))

    walk("", model, listed=False)
    return list({module: (path, module) for path, module in reversed(blocks)}.values())[::-1]


def _cut(
    model: nn.Module,
    blocks: Iterable[tuple[str, nn.Module]],
    granularity: str,
    exceptions: Callable[[str], str | None],
    *,
    with_large_leaves: bool,
) -> list[UnitModules]:
    """Create the units of a model without their parameters, inside and outside of blocks (see :func:`discover`), where
    large leaves are units if ``with_large_leaves``."""
    named = {name: module for name, module in blocks if name}
    owner: dict[int, str] = {}
    for name, block in named.items():
        owner |= {id(sub): name for sub in block.modules() if id(sub) not in owner}
    total = sum(parameter.numel() for parameter in model.parameters())
    number_of: dict[str, int] = {}
    units = []
    kept_whole: set[int] = set()  # modules inside a module that is not cut

    def add(name: str, module: nn.Module, home: str) -> None:
        number = number_of.setdefault(home or name, len(number_of))
        units.append(UnitModules(name, module, number, home))

    add("", model, "")
    for name, module in model.named_modules():
        if not name or id(module) in kept_whole:
            continue
        home = name if name in named else owner.get(id(module), "")
        if (exceptions(home) or granularity) == "module":
            is_whole = exceptions(name) == "block" and _is_called(module) and _owns_any(module)
            if is_whole:
                kept_whole |= {id(sub) for sub in module.modules()}
            is_unit = is_whole or (any(True for _ in module.parameters(recurse=False)) and _is_called(module))
        elif home:
            is_unit = name == home
        else:
            is_unit = with_large_leaves and _is_large_leaf(module, total)
        if is_unit:
            add(name, module, home)
    return units


def _assign_parameters(model: nn.Module, units: Sequence[UnitModules]) -> None:
    """Give every parameter to the innermost unit that contains all its uses."""
    by_module = {id(unit.module): unit for unit in units}
    homes: dict[int, list[list[UnitModules]]] = {}

    def walk(module: nn.Module, path: list[UnitModules], visited: tuple[int, ...]) -> None:
        if id(module) in visited:
            return
        if id(module) in by_module:
            path = [*path, by_module[id(module)]]
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), []).append(path)
        for child in module.children():
            walk(child, path, (*visited, id(module)))

    walk(model, [], ())
    for name, parameter in model.named_parameters():  # each parameter once, under its first name
        if is_ignored(parameter):
            continue
        paths = homes[id(parameter)]
        common = paths[0]
        for other in paths[1:]:
            common = [a for a, b in zip(common, other, strict=False) if a is b]
        common[-1].parameters += inner_tensors(name, parameter)


def _owns_any(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_large_leaf(module: nn.Module, total: int) -> bool:
    size = sum(parameter.numel() for parameter in module.parameters())
    return not any(True for _ in module.children()) and size * LARGE_LEAF >= total and _is_called(module)


def _is_called(module: nn.Module) -> bool:
    """Whether hooks on the module can ever run. Containers have no forward. ``nn.MultiheadAttention`` has a special
    class for its output projection, and reads the projection's weight without calling it."""
    forward = getattr(module.forward, "__func__", module.forward)
    return forward is not nn.Module.forward and not isinstance(module, NonDynamicallyQuantizableLinear)

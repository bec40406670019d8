"""The state of an optimizer over shares as torch's own state dict of the whole model, and back."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import safetensors.torch
import torch
from torch.distributed import _state_dict_utils as state_dict_utils

from thinwire.agreement import Typed
from thinwire.errors import CheckpointError
from thinwire.sharding.grads.unit_gradient import OwnedFragment
from thinwire.sharding.modules.quantized import inner_tensors, is_wrapper, rebuilt
from thinwire.sharding.optimizer.sharded_optimizer import ShardedOptimizer
from thinwire.sharding.optimizer.stock_optimizers import cut_entries
from thinwire.sharding.tensors.tensor import ShareTensor

_Entries = tuple[dict[str, bool], bytes, dict[str, object]]
"""A parameter's state: its keys, and whether they have an element for each of the parameter, so that ranks hold pieces;
tensors in safetensors, without elements if they are cut; and numbers, text, or lists and dictionaries of such."""

_STATES: Final[Typed[dict[str, _Entries]]] = Typed(dict[str, _Entries])


@torch.no_grad()
def whole_value(value: Any, *, keep: bool) -> Any:
    """An entry of a sharded model's state dict, whole and on the CPU; ``None`` on a rank that does not ``keep`` it.
    Collective."""
    if isinstance(value, ShareTensor) or is_wrapper(value):
        whole = _gathered(value)
        return whole.cpu() if keep else None
    if not keep:
        return None
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _gathered(value: torch.Tensor) -> torch.Tensor:
    """A tensor that is cut among ranks, or a wrapper around such ones, whole and new. Collective."""
    if is_wrapper(value):
        return rebuilt(value, _gathered)
    return value.full_tensor() if isinstance(value, ShareTensor) else value.detach().clone()


@functools.cache
def gather_for_torch() -> None:
    """Let ``get_model_state_dict(full_state_dict=True)``, its siblings of torch, and what else gathers a state dict by
    torch's function for it, gather shares as they gather DTensors: one by one. Once per process."""
    walk, as_is = state_dict_utils._iterate_state_dict, state_dict_utils._identity_func

    @functools.wraps(walk)
    def walk_over_shares(item: Any, of_sharded: Any, of_dtensor: Any, of_plain: Any, **options: Any) -> Any:
        gathers = of_plain is as_is and of_dtensor is not as_is
        if gathers and any(isinstance(part, ShareTensor) for _, part in inner_tensors("", item)):
            with torch.no_grad():
                item = _gathered(item)
        return walk(item, of_sharded, of_dtensor, of_plain, **options)

    state_dict_utils._iterate_state_dict = walk_over_shares  # type: ignore[assignment]


@torch.no_grad()
def whole_state(optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of the optimizer of the whole model, which is trained by data-parallel ranks only. Collective.

    Returns:
        ``{"state": {number: {key: value}}, "param_groups": [...]}`` as in torch, on the CPU; perhaps empty on all ranks
        but the first.
    """
    if isinstance(optim, ShardedOptimizer):
        return _of_fragments(optim, _names(optim))
    whole = optim.state_dict()  # of shares
    return whole | {
        "state": {
            number: {key: whole_value(value, keep=True) for key, value in entries.items()}
            for number, entries in whole["state"].items()
        }
    }


def load_whole_state(optim: torch.optim.Optimizer, whole: Mapping[str, Any]) -> None:
    """Load the ``state_dict()`` of the optimizer of the whole model; this rank takes its pieces.

    Raises:
        CheckpointError: It has other groups or other parameters.
    """
    if isinstance(optim, ShardedOptimizer):
        _load_fragments(optim, _names(optim), whole)
        return
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    shares = [share for group in optim.param_groups for share in group["params"]]
    state: dict[int, Any] = dict(whole["state"])
    for number, share in zip(numbers, shares, strict=False):  # torch itself compares the groups
        if number in state:
            state[number] = cut_entries(share, state[number])
    optim.load_state_dict({**whole, "state": state})


def _names(optim: ShardedOptimizer) -> list[Sequence[str]]:
    """Names of the parameters of each group, in the order of the optimizer of the whole model."""
    given = optim.given_names
    return [*given, *([share.spec.name for share in group["params"]] for group in optim.param_groups[len(given) :])]


def _of_fragments(optim: ShardedOptimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    shares, ranks = optim.shares, optim.runtime.control
    assert shares is not None
    owned = {item.name: item for item in optim.fragments}
    mine = {name: _told(entries, item) for name, item in owned.items() if (entries := optim.state.get(item.value))}
    everyone = {name: told for of_rank in ranks.all_gather_typed(mine, _STATES) for name, told in of_rank.items()}
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    state: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        if name not in everyone:
            continue
        keys, tensors, others = everyone[name]
        values: dict[str, Any] = {**safetensors.torch.load(tensors), **others}
        for key, is_cut in keys.items():  # in the same order on all ranks
            value = values[key]
            if is_cut:
                share = shares[name]
                piece = torch.empty(0, dtype=value.dtype, device=share.device)
                if name in owned:
                    piece = optim.state[owned[name].value][key].reshape(-1)
                value = ShareTensor(piece, share.spec).full_tensor().cpu()
            if ranks.rank == 0:
                state.setdefault(number, {})[key] = value
    if ranks.rank != 0:
        return {}
    groups = [
        _options(group) | {"params": [numbers[name] for name in of_group]}
        for group, of_group in zip(optim.param_groups, names, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _told(entries: Mapping[str, Any], owned: OwnedFragment) -> _Entries:
    tensors = {key: value.detach() for key, value in entries.items() if isinstance(value, torch.Tensor)}
    cut = {key for key, value in tensors.items() if value.dim() > 0 and value.numel() == owned.value.numel()}
    sent = {key: value.new_empty(0) if key in cut else value.clone() for key, value in tensors.items()}
    raw = safetensors.torch.save({key: value.cpu().contiguous() for key, value in sent.items()})
    return {key: key in cut for key in entries}, raw, {key: entries[key] for key in entries.keys() - tensors.keys()}


def _load_fragments(optim: ShardedOptimizer, names: Sequence[Sequence[str]], whole: Mapping[str, Any]) -> None:
    groups = whole["param_groups"]
    sizes, present = [len(group["params"]) for group in groups], [len(of_group) for of_group in names]
    if sizes != present:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, and this one has {present}: make the "
            "optimizer with the groups that it was saved with"
        )
    numbers = {
        name: number
        for group, of_group in zip(groups, names, strict=True)
        for number, name in zip(group["params"], of_group, strict=True)
    }
    owned = {id(item.value): item for item in optim.fragments}
    with optim.owned.over_fragments() as inner:
        local = inner.state_dict()["param_groups"]
        state: dict[int, Any] = {}
        for group, own in zip(inner.param_groups, local, strict=True):
            for value, index in zip(group["params"], own["params"], strict=True):
                item = owned[id(value)]
                if entries := whole["state"].get(numbers[item.name]):
                    state[index] = {key: _piece(entry, item) for key, entry in entries.items()}
        options = [_options(group) | {"params": own["params"]} for group, own in zip(groups, local, strict=True)]
        groups_here = inner.param_groups
        inner.load_state_dict({"state": state, "param_groups": options})
        # torch makes a new list, and others may hold this one, as schedulers do.
        groups_here[:], inner.param_groups = inner.param_groups, groups_here


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _piece(entry: Any, item: OwnedFragment) -> Any:
    if not isinstance(entry, torch.Tensor) or entry.dim() == 0 or entry.numel() != item.fragment.slot.numel:
        return entry
    begin = item.fragment.offset
    return entry.reshape(-1)[begin : begin + item.fragment.length].clone().view(item.value.shape)

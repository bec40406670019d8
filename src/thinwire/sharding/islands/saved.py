"""What a checkpoint holds of islands: what they agreed on, the outer momentum, and each island's own state.

What islands share is stored once, by parameter: ``model/NAME`` is what they agreed on last, which other plans and
exports read, and ``outer/momentum/NAME`` is the outer optimizer's. What differs between islands has the key of a
checkpoint without islands in the first one, and ``island-K/KEY`` in the others; ``island-K/model/NAME`` are the masters
of every island. ``outer/lost/...`` are rounding errors of exchanges, rank after rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from thinwire.sharding.grads.unit_gradient import OwnedFragment
from thinwire.sharding.islands.exchanges import Exchanges
from thinwire.sharding.islands.fragment_state import labelled
from thinwire.sharding.memory.layout import Slot


def own_key(key: str, island: int) -> str:
    """The key of what an island does not share; that of the first island is the key in a checkpoint without any."""
    return f"island-{island}/{key}" if island else key


def own_masters(island: int) -> str:
    """What keys of an island's masters begin with."""
    return f"island-{island}/model"


def shared_pieces(
    exchanges: Exchanges, fragments: Iterable[OwnedFragment]
) -> Iterator[tuple[Slot, int, torch.Tensor, torch.Tensor | None]]:
    """What this rank, which updates these fragments, keeps of the state that all islands share.

    Yields:
        The slot of the parameter; the first element of a piece, relative to the parameter; its values after the last
        outer step, fp32, 1-D; the outer momentum, of the same size, ``None`` without momentum.
    """
    by_name = {owned.name: owned for owned in fragments}
    for _, state in labelled(exchanges.parts):
        begin = 0
        for buffer, runs in state.sources:
            for owned in (by_name[slot.name] for slot in buffer.layout.slots if slot.name in by_name):
                first = begin + owned.begin
                low = max(first, state.begin)
                high = min(first + owned.fragment.length, state.begin + state.anchor.numel())
                if low < high:
                    kept = slice(low - state.begin, high - state.begin)
                    momentum = None if state.momentum is None else state.momentum[kept]
                    fragment = owned.fragment
                    yield fragment.slot, fragment.offset + low - first, state.anchor[kept], momentum
            begin += sum(run.length for run in runs)


def lost_of(exchanges: Exchanges) -> dict[str, torch.Tensor]:
    """Rounding errors of this rank's messages, by what they belong to."""
    return {
        f"{label}/{what}": lost
        for label, state in labelled(exchanges.parts)
        for what, lost in zip(("message", "mean"), state.lost, strict=True)
        if lost is not None
    }


def restore_lost(exchanges: Exchanges, lost: dict[str, torch.Tensor]) -> None:
    """Take over the rounding errors that :func:`lost_of` gave."""
    for label, state in labelled(exchanges.parts):
        state.lost = [lost.get(f"{label}/{what}") for what in ("message", "mean")]


def turns_of(exchanges: Exchanges) -> dict[str, Any]:
    """When exchanges under way are due, and since when islands are alike, by fragment, as JSON."""
    return {
        "pending": {str(fragment): pending.due for fragment, pending in sorted(exchanges.pending.items())},
        "alike": {str(fragment): step for fragment, step in sorted(exchanges.alike_since.items())},
    }


def resume_turns(exchanges: Exchanges, turns: Mapping[str, Any]) -> None:
    """Go on with what :func:`turns_of` gave; nothing is under way if it is empty."""
    exchanges.resume({int(fragment): due for fragment, due in turns.get("pending", {}).items()})
    exchanges.alike_since = {int(fragment): step for fragment, step in turns.get("alike", {}).items()}

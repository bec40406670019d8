"""What a checkpoint holds of islands: what they agreed on, the outer momentum, and each island's own state.

What islands share is stored once, by parameter: ``model/NAME`` is what they agreed on last, which other plans and
exports read, and ``outer/momentum/NAME`` is the outer optimizer's. What differs between islands has the key of a
checkpoint without islands in the first one, and ``island-K/KEY`` in the others; ``island-K/model/NAME`` are the masters
of every island. ``outer/lost/...`` are rounding errors of exchanges, rank after rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.sharding.grads.optimizer_shards import OwnedFragment
from thinwire.sharding.islands.exchanges import Exchanges


@dataclass(frozen=True)
class SharedPiece:
    """A piece of a parameter that all islands share, as this rank keeps it.

    Attributes:
        owned: The fragment of the parameter that it belongs to.
        offset: First element, relative to the parameter.
        anchor: Values after the last outer step, fp32, 1-D.
        momentum: The outer momentum, of the same size; ``None`` without momentum.
    """

    owned: OwnedFragment
    offset: int
    anchor: torch.Tensor
    momentum: torch.Tensor | None


def own_key(key: str, island: int) -> str:
    """The key of what an island does not share; that of the first island is the key in a checkpoint without any."""
    return f"island-{island}/{key}" if island else key


def own_masters(island: int) -> str:
    """What keys of an island's masters begin with."""
    return f"island-{island}/model"


def shared_pieces(exchanges: Exchanges, fragments: Iterable[OwnedFragment]) -> Iterator[SharedPiece]:
    """What this rank keeps of the state that all islands share, parameter by parameter.

    Args:
        exchanges: The exchanges of a model.
        fragments: The fragments that this rank updates.
    """
    by_name = {owned.fragment.slot.name: owned for owned in fragments}
    for state in (state for of_fragment in exchanges.parts for state in of_fragment):
        begin = 0
        for buffer, runs in state.sources:
            for owned in (by_name[slot.name] for slot in buffer.layout.slots if slot.name in by_name):
                position = int(owned.grad.storage_offset() - owned.source.owned.memory.storage_offset())
                first = begin + position
                low = max(first, state.begin)
                high = min(first + owned.fragment.length, state.begin + state.anchor.numel())
                if low < high:
                    kept = slice(low - state.begin, high - state.begin)
                    momentum = None if state.momentum is None else state.momentum[kept]
                    yield SharedPiece(owned, owned.fragment.offset + low - first, state.anchor[kept], momentum)
            begin += sum(run.length for run in runs)


def lost_of(exchanges: Exchanges) -> dict[str, torch.Tensor]:
    """Rounding errors of this rank's messages, by what they belong to."""
    return {
        f"{number}/{'encoded' if state.part.encoded else 'exact'}/{what}": lost
        for number, of_fragment in enumerate(exchanges.parts)
        for state in of_fragment
        for what, lost in zip(("message", "mean"), state.lost, strict=True)
        if lost is not None
    }


def restore_lost(exchanges: Exchanges, lost: dict[str, torch.Tensor]) -> None:
    """Take over the rounding errors that :func:`lost_of` gave."""
    for number, of_fragment in enumerate(exchanges.parts):
        for state in of_fragment:
            kind = "encoded" if state.part.encoded else "exact"
            state.lost = [lost.get(f"{number}/{kind}/{what}") for what in ("message", "mean")]


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

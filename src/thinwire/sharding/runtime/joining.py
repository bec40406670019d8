"""Lets ranks with different numbers of batches make the same calls: a rank that has none left repeats its last one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Final, TypeVar

from torch.utils._pytree import tree_map

from thinwire.agreement import Typed
from thinwire.errors import UsageError
from thinwire.sharding.runtime.runtime import Runtime

Item = TypeVar("Item")

_REMEDIES: Final = {
    "no batch": "give every rank at least one",
    "a batch that is an iterator": "a rank that runs out repeats its last batch, so give a list of micro-batches",
}
"""What is wrong with a rank's batches, and what to do about it."""


def joined(runtimes: Sequence[Runtime], batches: Iterable[Item]) -> Iterator[Item]:
    """Iterate over batches as :func:`thinwire.join` does, for models that are trained by the same ranks."""
    ranks, iterator = runtimes[0].everyone, iter(batches)
    missing = object()
    kept: Any = missing
    try:
        while True:
            current: Any = next(iterator, missing)
            problem = ""
            if current is missing and kept is missing:
                problem = "no batch"
            elif isinstance(current, Iterator):
                problem = "a batch that is an iterator"
            going, refused = ranks.all_reduce_mean([float(current is not missing), float(bool(problem))])
            if not going:
                return
            if refused:
                told = ranks.all_gather_typed(problem, Typed[str](str))
                first = next(filter(None, told))
                names = " and ".join(
                    f"rank {rank}" for rank, its in zip(ranks.ranks, told, strict=True) if its == first
                )
                raise UsageError(f"{first} for thinwire.join on {names}: {_REMEDIES[first]}")
            for runtime in runtimes:
                runtime.count_gradients(wanted=current is not missing)
            if current is missing:
                current = _same(kept)
            else:
                kept = _same(current)
            yield current
    finally:
        for runtime in runtimes:
            runtime.count_gradients(wanted=True)


def _same(batch: Any) -> Any:
    """The same batch in containers of its own: loops take keys out of a batch, and put others in."""
    # torch knows dictionaries, lists and tuples, but not the mappings of other libraries, such as BatchEncoding.
    return tree_map(lambda leaf: copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf, batch)

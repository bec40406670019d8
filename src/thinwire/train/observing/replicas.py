"""Finds the rank whose numbers are wrong although nothing has failed.

Ranks that hold the same gradients, master values or parameters compare sums of their bits. Where most agree, the others
are wrong. Where two disagree, both compute the step's gradient again: the one whose first result was another is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from thinwire.agreement import Typed
from thinwire.collectives.group import control
from thinwire.errors import ReplicaError, UsageError
from thinwire.parallel import ParallelModel, ParallelOptimizer
from thinwire.parallel.model import TokenBatch
from thinwire.sharding.corruption_check import SUMS, Disagreement, Sums, compare, sums_of

_SENTENCES: Final[Typed[list[str]]] = Typed(list[str])
_COUNTS: Final[Typed[tuple[int, bool]]] = Typed(tuple[int, bool])

_MOST: Final = 3
"""Most units that an error names; a wrong parameter soon spoils all of them."""


class ReplicaChecks:
    """Compares replicas every few steps."""

    def __init__(self, model: ParallelModel, optim: ParallelOptimizer, hosts: Sequence[str], *, every: int) -> None:
        self._model, self._optim, self._hosts, self._every = model, optim, tuple(hosts), every
        self._has_compared = False

    def due(self, step: int) -> bool:
        """Whether a step is one after which replicas are compared. The first is: it tells whether there are any."""
        return self._every > 0 and (step % self._every == 0 or not self._has_compared)

    def compare(self, step: int, batches: Sequence[TokenBatch]) -> None:
        """Compare replicas after a step's backward and before its update. All ranks call it.

        Raises:
            ReplicaError: On all ranks, if replicas differ; names the rank, the unit and the step.
            UsageError: On all ranks, if the plan has no replicas at all.
        """
        self._has_compared = True
        first = _sums(self._optim)
        differing, shared = _compared(self._optim, first)
        undecided = any(not one.decided for one in differing)
        counts = control().all_gather_typed((shared, undecided), _COUNTS)
        if not any(number for number, _ in counts):
            raise UsageError(
                "train.check_replicas compares nothing: under this plan every rank holds something else; leave it out, "
                "or choose a plan whose parameters, gradients or optimizer states are on several ranks"
            )
        repeated = self._repeat(first, batches) if any(undecided for _, undecided in counts) else {}
        found = [self._sentence(one, step, repeated) for one in differing[:_MOST]]
        everywhere = [text for texts in control().all_gather_typed(found, _SENTENCES) for text in texts]
        if everywhere:
            raise ReplicaError("; ".join(dict.fromkeys(everywhere)))

    def _repeat(self, first: Sequence[Sums], batches: Sequence[TokenBatch]) -> dict[str, list[int]]:
        """Compute the gradient again; the ranks by what they now have another sum of."""
        self._optim.zero_grad()
        self._model.step(batches)
        again = _sums(self._optim)
        changed = [
            _label(key) for old, new in zip(first, again, strict=True) for key in old if old[key] != new.get(key)
        ]
        by_rank = control().all_gather_typed(changed, _SENTENCES)
        ranks: dict[str, list[int]] = {}
        for rank, labels in enumerate(by_rank):
            for label in dict.fromkeys(labels):
                ranks.setdefault(label, []).append(rank)
        return ranks

    def _sentence(self, one: Disagreement, step: int, repeated: dict[str, list[int]]) -> str:
        what = f"{one.kind} of {one.unit} differ between replicas in step {step}"
        if one.decided:
            wrong, why = list(one.wrong), f"{len(one.ranks) - len(one.wrong)} of {len(one.ranks)} ranks agree"
        else:
            changed = repeated.get(_label(f"{one.kind}|{one.unit}|"), [])
            wrong, why = [rank for rank in one.ranks if rank in changed], "the step computed again gives another result"
        if not wrong or len(wrong) == len(one.ranks):
            ranks = " and ".join(map(self._name, one.ranks))
            return f"{what}: {ranks} disagree, and nothing tells which is wrong; {_REMEDY}"
        return f"{what}: {' and '.join(map(self._name, wrong))} is wrong ({why}); {_REMEDY}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"


def _sums(optim: ParallelOptimizer) -> list[Sums]:
    """The sums of each part of the model, whose gradients are those of a backward that is complete."""
    return [sums_of(part.runtime, part.fragments) for part in optim.parts]


def _compared(optim: ParallelOptimizer, sums: Sequence[Sums]) -> tuple[list[Disagreement], int]:
    """What differs among the ranks that train the same parts, and how many things have a replica. Collective."""
    differing: list[Disagreement] = []
    shared = 0
    for part, mine in zip(optim.parts, sums, strict=True):
        everyone = part.runtime.data_ranks
        found, number = compare(everyone.all_gather_typed(mine, SUMS), everyone.ranks)
        differing, shared = [*differing, *found], shared + number
    return differing, shared


_REMEDY: Final = (
    "a processor, memory or link is faulty: take that host out of the job, and continue with --resume from a "
    "checkpoint of before"
)


def _label(key: str) -> str:
    """Kind and unit of a sum."""
    kind, unit, _ = key.split("|")
    return f"{kind}|{unit}"

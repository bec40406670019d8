"""Sequences of actions on every rank, against what one process makes of them.

Under an exact plan all values are compared. Under a lossy one, parameters are compared by how far they went, with the
values that ranks compute with, and bit for bit with a second performance. What thinwire refuses ends a sequence, if the
refusal is a sentence of its own.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.behaviours.context import LOSSY, Alone, OnThinwire, preset_plan
from tests.behaviours.runner import difference
from tests.behaviours.sequences import ACTIONS, Action, Subject, begun

import thinwire as tw
from thinwire.errors import SpecError, UsageError
from thinwire.program import Lane
from thinwire.sharding.api import runtime

__all__ = ["batches", "on_ranks", "shrunk"]

Values = dict[str, torch.Tensor]
"""Whole parameters by name."""

_STALE = "modified by an inplace operation"
"""What torch says of a graph whose tensors were written to."""

ONE, ALL = 0.8, 0.3
"""How far a parameter, and all of them, may be from where they should be, of the way that they went. One that is not
trained, or twice, is 1 away; the coarsest codecs of lossy plans leave 0.66 and 0.2."""
ROUNDED = 0.005
"""How far rounding to bf16 moves a parameter, of its norm."""
COMPUTED = 0.01
"""How far the values of a forward may be from the masters, of the norm of all."""


def on_ranks(sequences: Sequence[tuple[Sequence[Action], list[Any]]], preset: str, folder: str) -> list[str]:
    """Perform sequences on this rank; what went wrong with each: nothing, a refusal, or a difference."""
    performed = _lossy if preset.startswith(LOSSY) else _exact
    return [
        performed(sequence, wanted, preset, Path(folder) / str(number))
        for number, (sequence, wanted) in enumerate(sequences)
    ]


def _exact(sequence: Sequence[Action], wanted: list[Any], preset: str, folder: Path) -> str:
    return _outcome(sequence, preset, folder, lambda got, position: difference(got, wanted[position], 1e-4))


def _lossy(sequence: Sequence[Action], wanted: list[Any], preset: str, folder: Path) -> str:
    once: list[Any] = [None]

    def first(got: Any, position: int) -> str:
        once.append(got)
        return _far(got, wanted[-1], sequence[0]) if position == len(sequence) else ""

    def second(got: Any, position: int) -> str:
        return difference(got, once[position], 0.0)

    return _outcome(sequence, preset, folder, first) or _outcome(sequence, preset, folder / "again", second)


def _outcome(sequence: Sequence[Action], preset: str, folder: Path, compared: Callable[[Any, int], str]) -> str:
    ctx = OnThinwire(preset, folder)
    beginning, *rest = sequence
    name = "beginning"
    try:
        it = begun(ctx, beginning)
        for position, (name, number) in enumerate(rest, 1):
            before = len(it.log)
            try:
                ACTIONS[name][0](it, random.Random(number))
            except RuntimeError as error:
                if isinstance(error, UsageError) or not it.repointed or _STALE not in str(error):
                    raise
                return f"refused: {name}: {_STALE}"
            if found := compared(it.log[before:], position):
                return f"wrong: {position}: {name}: {found}"
        name = "end"
        if found := compared(ctx.whole(it.model), len(sequence)) or _computed(it.model, ctx) or _sent(it, ctx):
            return f"wrong: {found}"
    except (SpecError, UsageError) as error:
        return f"refused: {name}: {' '.join(str(error).split())}"
    except Exception as error:
        return f"crashed: {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        with contextlib.suppress(Exception):
            ctx.close()
    return ""


def _far(got: Values, wanted: Values, beginning: Action) -> str:
    """Where parameters went elsewhere than in one process."""
    alone = Alone(1, Path())
    begin = alone.whole(begun(alone, beginning).model)
    gaps = {name: float((got[name].float() - want).norm()) for name, want in wanted.items()}
    ways = {n: float((w - begin[n]).norm()) + ROUNDED * float(w.norm()) + 1e-3 for n, w in wanted.items()}
    worst = max(gaps, key=lambda name: gaps[name] / ways[name])
    of_all = math.hypot(*gaps.values()) / math.hypot(*ways.values())
    if gaps[worst] <= ONE * ways[worst] and of_all <= ALL:
        return ""
    return f"{worst} is {gaps[worst]:.4f} away after a way of {ways[worst]:.4f}, all {of_all:.2f} of theirs"


def _computed(model: torch.nn.Module, ctx: OnThinwire) -> str:
    """Where forwards compute with other values than those that are trained."""
    wire = preset_plan(ctx.preset, ctx.world).wire
    if not (wire.spread.is_lossless or wire.spread_difference):
        return ""  # such values may be anywhere within a block's largest
    masters = ctx.whole(model)
    with ctx.full_parameters(model):
        gaps = {name: float((p.detach().float() - masters[name]).norm()) for name, p in model.named_parameters()}
    gap, norm = (math.hypot(*values) for values in (gaps.values(), (float(p.norm()) for p in masters.values())))
    return "" if gap <= COMPUTED * norm else f"computes with values {gap:.4f} away: {gaps}"


def _sent(it: Subject, ctx: OnThinwire) -> str:
    """Where an ordinary step does not send the bytes that its program says."""
    own, plan = runtime(it.model), preset_plan(ctx.preset, ctx.world)
    if any(codec.is_variable_length for codec in plan.wire.codecs().values()):
        return ""
    if "reentrant" in it.model.traits and {"shared", "tied", "twice"} & {*it.model.traits}:
        return ""  # each call's own backward brings gradients, and what two calls share is reduced twice
    it.optim.zero_grad()
    it.model.listing, it.model.skipped = False, -1
    for _ in range(4):  # after a forward without a backward, the order of units is only known after two of them
        own.join_spreads()
        tw.traffic(it.model)
        it.model(it.x()).square().mean().backward()
        it.optim.step()
        it.optim.zero_grad()
        own.join_spreads()
    sent, wanted = tw.traffic(it.model), own.schedule.programs.program(1).traffic()
    found = {
        lane: (sent[lane], dict(wanted[lane]))
        for lane in wanted
        if lane is not Lane.CONTROL and sent[lane] != wanted[lane]
    }
    return f"sent and predicted bytes: {found}" if found else ""


def shrunk(sequence: Sequence[Action], fails: Callable[[Sequence[Action]], bool]) -> list[Action]:
    """The sequence without the actions that its failure does not need."""
    left = list(sequence)
    for number in reversed(range(1, len(sequence))):
        shorter = [*left[:number], *left[number + 1 :]]
        if fails(shorter):
            left = shorter
    return left


def batches(first: int, count: int, size: int) -> Iterator[range]:
    """Seeds in batches."""
    for begin in range(first, first + count, size):
        yield range(begin, min(begin + size, first + count))

"""Runs behaviours on real ranks, many in one job, and returns the outcome of each.

A behaviour that is refused, wrong or fails ends its job, because ranks may have stopped at different places; the rest
continues in a new job. A rank that is still busy after :data:`LIMIT` seconds ends itself.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import os
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.behaviours.catalog import Behaviour, catalogue
from tests.behaviours.context import Alone, Context, OnFSDP2, OnThinwire

from thinwire.errors import ThinwireError
from thinwire.testing import RankError, RankPool

__all__ = ["Outcome", "difference", "run"]

LIMIT = 60.0
"""Seconds that one behaviour may take."""
_TIMEOUT = 30.0
"""Seconds until a collective fails."""

Outcome = tuple[str, str]
"""``equal``, ``refused``, ``wrong``, ``crashed`` or ``hung``; and the sentence, the difference or the end of the
traceback."""


def run(names: Sequence[str], preset: str, world: int) -> dict[str, Outcome]:
    """Run behaviours on ranks and compare each with one process.

    Args:
        names: of behaviours.
        preset: of the plan; ``"fsdp2"`` for torch's ``fully_shard``.
        world: number of ranks.
    """
    outcomes: dict[str, Outcome] = {}
    pool = RankPool(world)
    references = _references(tuple(names), world)
    waiting = list(names)
    try:
        while waiting:
            with tempfile.TemporaryDirectory() as folder:
                died = False
                try:
                    pool.run(
                        _perform,
                        waiting,
                        preset,
                        folder,
                        references,
                        timeout=LIMIT * len(waiting) + 60.0,
                        group_timeout=_TIMEOUT,
                    )
                except RankError:
                    died = True
                finished = _collect(Path(folder), waiting, world)
            outcomes |= finished
            if died or any(kind in ("crashed", "hung") for kind, _ in finished.values()):
                pool.close()
            waiting = [name for name in waiting if name not in outcomes]
    finally:
        pool.close()
    return outcomes


def _collect(folder: Path, names: Sequence[str], world: int) -> dict[str, Outcome]:
    """Outcomes of the behaviours of one job, up to the first that not every rank finished."""
    finished: dict[str, Outcome] = {}
    for name in names:
        by_rank: list[Outcome] = []
        for rank in range(world):
            path = folder / f"{name}.{rank}.json"
            if path.exists():
                kind, text = json.loads(path.read_text())
                by_rank.append((kind, text))
        if not by_rank:
            if not finished:
                finished[name] = ("crashed", "every rank died")
            return finished
        if len(by_rank) < world:
            finished[name] = ("crashed", "a rank died")
            return finished
        finished[name] = _together(by_rank, some_ranks=catalogue()[name].some_ranks)
    return finished


def _together(by_rank: Sequence[Outcome], *, some_ranks: bool) -> Outcome:
    for kind in ("hung", "crashed", "wrong"):
        for outcome in by_rank:
            if outcome[0] == kind:
                return outcome
    refusals = [outcome for outcome in by_rank if outcome[0] == "refused"]
    if refusals and len(refusals) < len(by_rank) and not some_ranks:
        return "crashed", f"refused on some ranks only: {refusals[0][1]}"
    return refusals[0] if refusals else by_rank[0]


# -- one process -----------------------------------------------------------------------------------------------


@functools.cache
def _references(names: tuple[str, ...], world: int) -> bytes:
    """The results of one process by behaviour, in the format of torch.save."""
    pool = RankPool(1)
    try:
        (references,) = pool.run(_alone, list(names), world, init=False, timeout=300.0)
    finally:
        pool.close()
    return bytes(references)


def _alone(names: Sequence[str], world: int) -> bytes:
    import io

    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = catalogue()[name].function(Alone(world, Path(folder)))
            except Exception as error:
                raise AssertionError(f"{name} fails in one process") from error
    buffer = io.BytesIO()
    torch.save(results, buffer)
    return buffer.getvalue()


# -- one rank --------------------------------------------------------------------------------------------------


def _perform(names: Sequence[str], preset: str, folder: str, references: bytes) -> None:
    import io

    wanted = torch.load(io.BytesIO(references), weights_only=False)
    store = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, name in enumerate(names):
        path = Path(folder) / f"{name}.{rank}.json"
        own = Path(folder) / name
        own.mkdir(exist_ok=True)
        watchdog = threading.Timer(LIMIT, _expire, [path])
        watchdog.daemon = True
        watchdog.start()
        context = OnFSDP2(own) if preset == "fsdp2" else OnThinwire(preset, own)
        outcome = _outcome(catalogue()[name], context, wanted[name])
        watchdog.cancel()
        path.write_text(json.dumps(outcome))
        store.set(f"behaviours/{number}/{rank}", outcome[0])
        keys = [f"behaviours/{number}/{other}" for other in range(world)]
        try:
            store.wait(keys, datetime.timedelta(seconds=LIMIT))
        except dist.DistStoreError:
            return
        if any(store.get(key) != b"equal" for key in keys):
            return
        with contextlib.suppress(Exception):
            context.close()
        if number % 8 == 7:
            gc.collect()


def _expire(path: Path) -> None:
    path.write_text(json.dumps(("hung", f"no end after {LIMIT:.0f} s")), encoding="utf-8")
    os._exit(17)


def _outcome(one: Behaviour, context: Context, want: Any) -> Outcome:
    try:
        got = one.function(context)
        found = difference(got, want, one.tolerance)
    except ThinwireError as error:
        return "refused", " ".join(str(error).split())
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        kind = "hung" if "timed out" in str(error).lower() or "timeout" in str(error).lower() else "crashed"
        places = [line.strip() for line in lines if line.strip().startswith("File")][-2:]
        return kind, f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({'; '.join(places)})"
    return ("wrong", found) if found else ("equal", "")


def difference(got: Any, want: Any, tolerance: float, where: str = "result") -> str:
    """Where two results differ; empty if they do not.

    Args:
        got: a number, text, tensor, or lists and dictionaries of such.
        want: what it should be.
        tolerance: largest relative difference of a tensor's norm.
        where: name of the result.
    """
    if isinstance(want, dict):
        if not isinstance(got, dict) or list(got) != list(want):
            keys = list(got) if isinstance(got, dict) else type(got).__name__
            return f"{where} has {keys}, expected {list(want)}"
        pairs = [(f"{where}[{key!r}]", got[key], want[key]) for key in want]
    elif isinstance(want, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(want):
            return f"{where} is {got!r:.80}, expected {len(want)} values"
        pairs = [(f"{where}[{index}]", a, b) for index, (a, b) in enumerate(zip(got, want, strict=True))]
    else:
        return _leaf_difference(got, want, tolerance, where)
    for place, a, b in pairs:
        if text := difference(a, b, tolerance, place):
            return text
    return ""


def _leaf_difference(got: Any, want: Any, tolerance: float, where: str) -> str:
    if isinstance(want, float):
        got, want = torch.as_tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64)
    if not isinstance(want, torch.Tensor):
        return "" if got == want else f"{where} is {got!r:.80}, expected {want!r:.80}"
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        shape = tuple(got.shape) if isinstance(got, torch.Tensor) else got
        return f"{where} is {shape!r:.80}, expected a tensor of shape {tuple(want.shape)}"
    if not want.is_floating_point():
        return "" if torch.equal(got.to(want.dtype), want) else f"{where} differs"
    a, b = got.detach().double(), want.detach().double()
    gap, allowed = float((a - b).norm()), tolerance * float(b.norm()) + 1e-7
    return "" if gap <= allowed or (a == b).all() else f"{where} differs by {gap:.2e}, {allowed:.2e} is allowed"

"""Explains failures of the transport: which exchange, for how long, and where the other ranks are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from thinwire.collectives.job.connecting import abort_links
from thinwire.collectives.job.current import job
from thinwire.collectives.job.rollcall import REMEDY
from thinwire.collectives.links.patience import STORE_PATIENCE, within_patience
from thinwire.errors import CollectiveError, MismatchError


def failure_of(
    error: RuntimeError, started: float, kind: str, lane: str, ranks: Sequence[int], nbytes: int | None = None
) -> CollectiveError | MismatchError:
    """Turn an error of the transport, which names neither operation nor culprit, into a sentence that names both. The
    exchange began at ``started`` of ``time.monotonic()``."""
    job.has_failed = True
    abort_links(native=True)
    if verdict := job.rollcall.find_verdict():
        return MismatchError(f"rank {dist.get_rank()}: {verdict}")
    size = "" if nbytes is None else f"{nbytes} bytes, "
    reason = _reason(str(error)) or type(error).__name__
    return _failed(f"{kind} on the {lane} lane", ranks, started, reason, size=size, absence=job.rollcall.absence)


@contextlib.contextmanager
def explained_transport(doing: str, ranks: Sequence[int]) -> Iterator[None]:
    """Explain errors of the transport in communication of other code, which is ``doing`` something. Other errors pass
    unchanged.

    Raises:
        CollectiveError: In place of an error of the transport.
    """
    started = time.monotonic()
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        reason = _transport_reason(error)
        if reason is None:
            raise
        raise _failed(doing, ranks, started, reason) from error


def _failed(
    what: str, ranks: Sequence[int], started: float, reason: str, *, size: str = "", absence: Callable[[], str] = str
) -> CollectiveError:
    """The error of an exchange that began at ``started``, once the other ranks have been asked where they are."""
    waited = time.monotonic() - started
    others = _publish_and_ask(f"failed in {what} ({size}after {waited:.1f} s)", ranks)
    return CollectiveError(
        f"rank {dist.get_rank()}: {what} with ranks {list(ranks)} failed after {waited:.1f} s "
        f"({size}timeout {job.timeout.total_seconds():.0f} s): {reason}. "
        f"{others}{absence() or _if_done(reason, others)}"
    )


def _reason(text: str) -> str:
    """The first line of the transport's text, without its guess at the cause and its advice."""
    return text.strip().partition("\n")[0].partition(_GUESS)[0].rstrip(" .")


_GUESS = "This is typically caused"
"""How gloo goes on where a peer has closed its connection."""

_CLOSED = "Connection closed by peer"

_SILENT = "said nothing: dead, stuck or cut off"


def _if_done(reason: str, others: str) -> str:
    """Sentence on a rank that has closed its connection in silence: it may also have ended by itself, as one does that
    has fewer batches."""
    return f" Or it was done. {REMEDY}." if _CLOSED in reason and _SILENT in others else ""


_TRANSPORT_SIGNS = ("gloo", "Connection closed", "Connection reset", "Connection refused", "imed out", "NCCL")


def _transport_reason(error: BaseException | None) -> str | None:
    """The line of an error or of its causes that reports a failure of the transport; ``None`` if there is none."""
    while error is not None:
        for line in str(error).strip().splitlines():
            if any(sign in line for sign in _TRANSPORT_SIGNS):
                return _reason(line)
        error = error.__cause__ or error.__context__
    return None


def _publish_and_ask(what: str, ranks: Sequence[int]) -> str:
    """Publish where this rank failed in the store, and return a sentence on where the others did."""
    answer = within_patience(lambda: _ask_store(what, ranks))
    silence = f"The store has not answered for {STORE_PATIENCE:.0f} s: this host or its host, rank 0's, is cut off."
    return answer or silence


def _ask_store(what: str, ranks: Sequence[int]) -> str:
    """Publish and ask. This blocks until the store answers."""
    try:
        store = job.default_store()
        me = dist.get_rank()
        store.set(f"thinwire/failure/{me}", what)
        time.sleep(0.5)  # by then, peers that failed at the same moment have published too
        silent = []
        failures = []
        for rank in ranks:
            if rank == me:
                continue
            key = f"thinwire/failure/{rank}"
            if store.check([key]):
                failures.append(f"rank {rank} {store.get(key).decode()}")
            else:
                silent.append(str(rank))
        lost = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)} {_SILENT}"
        if silent:  # ranks that wait for this one learn for whom it waited
            store.set(f"thinwire/failure/{me}", f"{what} ({lost})")
    except RuntimeError:
        return "The store is gone too: the rank that hosted it, rank 0 as a rule, has died."
    sentence = "; ".join([*failures, lost] if silent else failures)
    return f"{sentence[:1].upper()}{sentence[1:]}."

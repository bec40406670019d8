"""The members of a process group as thinwire's collectives need them: one axis with a single hop."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from thinwire.collectives.gloo import GlooLinks, make_device
from thinwire.collectives.group import Meter, Subgroup, before_shutdown
from thinwire.collectives.links import Links
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import CollectiveError
from thinwire.program import Kind, Lane
from thinwire.program.stages import TRANSFERS, Stage

__all__ = ["MemberGroup", "MembersAxis"]

_device: dist.ProcessGroupGloo.Device | None = None


def _shared_device() -> dist.ProcessGroupGloo.Device:
    """The transport device of all axes. They share one, because each device has a thread that polls."""
    global _device
    if _device is None:
        _device = make_device()
        before_shutdown(_forget_device)
    return _device


def _forget_device() -> None:
    global _device
    _device = None


class MemberGroup(Subgroup):
    """All members of a process group, with connections of their own, so that no other traffic comes in between.

    Args:
        ranks: Global ranks, in the group's order.
        index: Position of this rank among them.
        axis: Name of the axis, for error messages.
        store: Store for the rendezvous, used by nothing else.
        timeout: Timeout of each exchange.
    """

    def __init__(
        self, ranks: tuple[int, ...], index: int, axis: str, store: dist.Store, timeout: datetime.timedelta
    ) -> None:
        self.ranks, self.index, self.size = ranks, index, len(ranks)
        self.lane, self.stage, self.meter = Lane.CONTROL, Stage.GATHER_INSIDE, Meter()
        self.scope = self.stage.scope
        self._left = False
        self.sent = 0
        """Bytes sent so far."""
        self._axis, self._timeout = axis, timeout
        try:
            self._links = GlooLinks(store, index, len(ranks), _shared_device(), timeout)
        except RuntimeError as error:
            raise self._explained("connection", error) from error

    def _note(self, kind: Kind, sent: int) -> None:
        self.sent += sent

    @contextlib.contextmanager
    def _performing(
        self, kind: Kind, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
    ) -> Iterator[Links]:
        assert self._links is not None
        try:
            yield self._links
        except RuntimeError as error:
            nbytes = sum(t.numel() * t.element_size() for i, t in enumerate(outgoing) if i != self.index)
            raise self._explained(f"{kind} of {nbytes} bytes", error) from error

    def _explained(self, what: str, error: RuntimeError) -> CollectiveError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CollectiveError(
            f"axis {self._axis}: an encoded {what} between ranks {list(self.ranks)} failed (timeout "
            f"{self._timeout.total_seconds():.0f} s): {reason}. If all of them are alive, one of them did not encode: "
            "all ranks of an axis must enter step_scope() at the same point and have the same codecs"
        )


class MembersAxis(AxisGroup):
    """A :class:`MemberGroup` as an axis inside one node."""

    def __init__(self, members: MemberGroup) -> None:
        self.size = self.local = members.size
        self.index = self.local_index = members.index
        self.nodes = 1
        self.members = members
        self._subgroups = dict.fromkeys(TRANSFERS, members)

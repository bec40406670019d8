"""Who takes part in an exchange of elastic islands: a decision that all of them take alike, from the same list.

The list is a quorum of torchft's lighthouse. Nothing here exchanges anything.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Participant(NamedTuple):
    """What an island says of itself when it asks who is there.

    Attributes:
        name: Its name, which no other has, and no earlier life of the same island.
        island: Its number.
        step: Updates made.
        entering: Whether it has come to train with the others, rather than to exchange.
        fresh: Whether it lacks the state of an inner optimizer.
        checksum: Of what it believes all islands agreed on last: anchors and outer momentum.
        plan: Fingerprint of its plan.
        store: Address of its store, where connections meet.
        states: Address of each of its ranks, where others fetch its state.
        cycle: Seconds that it takes for the steps of an exchange, at its pace since the last one; 0 if it made none.
        connection: Key of the meeting that its connections are from; empty without any.
    """

    name: str
    island: int
    step: int
    entering: bool
    fresh: bool
    checksum: int
    plan: str
    store: str
    states: tuple[str, ...]
    cycle: float
    connection: str


class Expected(NamedTuple):
    """When an island that waits expects the others.

    Attributes:
        moment: Of ``time.monotonic()``, at which they meet next, or have just begun to.
        cycle: Seconds from one of their meetings to the next; ``None`` if they are expected once.
    """

    moment: float
    cycle: float | None = None

    def covers(self, moment: float) -> bool:
        """Whether the others may be meeting at a moment, so that the lighthouse should count the time from the first
        request on.

        An island that has just missed a meeting is not answered before the next one. Its request must not be an old one
        then: the lighthouse would wait for nobody else, and leave out another island. So it expects the others half a
        cycle long, and from the next meeting on again. These times become longer, because the lighthouse may wait
        longer for an island that is late.
        """
        late = moment - self.moment
        if late < 0 or not self.cycle:
            return late >= 0
        begin, length = 0.0, self.cycle / 2
        while late >= begin + length:
            begin = math.ceil((begin + length) / self.cycle + 0.5) * self.cycle
            length *= 2
        return late >= begin


class Quorum(NamedTuple):
    """Islands that are there at the same moment.

    Attributes:
        key: Name of the meeting, which no other has.
        members: Islands that agree about the newest state, in the order of their names. They exchange, unless they are
            only entering.
        comers: The others, which fetch the state that members have after their exchange.
    """

    key: str
    members: tuple[Participant, ...]
    comers: tuple[Participant, ...]

    @property
    def cycle(self) -> float | None:
        """Seconds that the members usually take for the steps of an exchange; ``None`` if they have made none."""
        cycles = [member.cycle for member in self.members if member.cycle]
        return statistics.median_low(cycles) if cycles else None

    @property
    def connection(self) -> str | None:
        """The meeting whose connections the members still have, if they are the same members."""
        (first, *others) = {member.connection for member in self.members}
        return None if others or not first else first

    def source_of(self, name: str) -> Participant:
        """The member from which an island that came fetches. They take turns."""
        names = [comer.name for comer in self.comers]
        return self.members[names.index(name) % len(self.members)]


def sort_out(key: str, participants: Sequence[Participant]) -> Quorum:
    """Decide who exchanges and who fetches.

    Islands that have made the most updates are ahead. If some of them are at the end of an exchange's steps and others
    only enter, the former lead. If they disagree about what they agreed on last, most decide, then the first name:
    islands that differ fetch, so that all are equal again. The order of participants does not matter.
    """
    newest = max(participant.step for participant in participants)
    ahead = sorted(p for p in participants if p.step == newest)
    leading = [p for p in ahead if not p.entering] or ahead
    by_state = sorted(leading, key=lambda p: (p.checksum, p.name))
    groups = [tuple(group) for _, group in itertools.groupby(by_state, key=lambda p: p.checksum)]
    members = min(groups, key=lambda group: (-len(group), group[0].name))
    comers = sorted(p for p in participants if p not in members)
    return Quorum(key, members, tuple(comers))

"""What a collective carries, as timelines and programs name it."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.program import Axis


@dataclass(frozen=True, slots=True)
class Load:
    """Description of a collective's data, and its axis.

    Attributes:
        label: Name of the collective in timelines.
        axis: Axis of the mesh that the collective runs along.
        units: Numbers of the units whose data the collective carries.
        encoded: Whether the plan's codecs apply to the data.
    """

    label: str
    axis: Axis
    units: tuple[int, ...] = ()
    encoded: bool = False

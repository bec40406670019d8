"""Compresses what other libraries send.

A :class:`CompressingGroup` replaces a process group and encodes what DTensor, FSDP2, DDP or a pipeline sends through
it, without their knowledge. ``docs/intercept.md`` shows how to use it.
"""

from thinwire.intercept.gate import AxisCodecs
from thinwire.intercept.group import CompressingGroup
from thinwire.intercept.mesh import (
    BackendOptions,
    axis_backend,
    axis_traffic,
    compress_axis,
    compress_group,
    compress_mesh,
)
from thinwire.intercept.scope import StepMarks, exact_scope, mark_steps, step_scope
from thinwire.intercept.traffic import AxisTraffic, TrafficRow

__all__ = [
    "AxisCodecs",
    "AxisTraffic",
    "BackendOptions",
    "CompressingGroup",
    "StepMarks",
    "TrafficRow",
    "axis_traffic",
    "axis_backend",
    "compress_axis",
    "compress_group",
    "compress_mesh",
    "exact_scope",
    "mark_steps",
    "step_scope",
]

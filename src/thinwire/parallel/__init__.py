"""Tensor and pipeline parallelism on torch's own DTensor and pipelining, with a codec for each axis, around shards.

A job's ranks form a :class:`~thinwire.parallel.grid.Grid`: stages of a pipeline, data-parallel ranks, tensor-parallel
ranks. :func:`~thinwire.parallel.model.parallelize` cuts a model over it; within the data-parallel ranks of each part
the plan's sharding works as it does alone.
"""

from thinwire.parallel.divisible import Divisible
from thinwire.parallel.grid import Grid
from thinwire.parallel.model import ParallelModel, ParallelOptimizer, parallelize

__all__ = ["Divisible", "Grid", "ParallelModel", "ParallelOptimizer", "parallelize"]

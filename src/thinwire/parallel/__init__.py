"""Tensor and pipeline parallelism on torch's own DTensor and pipelining, with a codec for each axis, around shards.

The ranks of a job form a :class:`~thinwire.parallel.grid.Grid` of pipeline stages, data-parallel ranks and
tensor-parallel ranks, over which :func:`~thinwire.parallel.model.parallelize` splits a model. The plan then shards each
part over its data-parallel ranks.
"""

from thinwire.parallel.divisible import Divisible
from thinwire.parallel.grid import Grid
from thinwire.parallel.model import ParallelModel, parallelize
from thinwire.parallel.optimizer import ParallelOptimizer

__all__ = ["Divisible", "Grid", "ParallelModel", "ParallelOptimizer", "parallelize"]

"""Every command of ``thinwire bench``, as the entry point of this package names it."""

from __future__ import annotations

from thinwire_bench.cli.bench import bench
from thinwire_bench.cli.codecs import codecs
from thinwire_bench.cli.convergence import convergence
from thinwire_bench.cli.gains import kernels, stages, techniques
from thinwire_bench.cli.hybrid import hybrid
from thinwire_bench.cli.overlap import overlap
from thinwire_bench.cli.planner import planner
from thinwire_bench.cli.reductions import reductions
from thinwire_bench.cli.spectra import spectra

__all__ = ["bench"]

for _command in (overlap, codecs, convergence, reductions, spectra, hybrid, techniques, kernels, stages, planner):
    bench.command()(_command)

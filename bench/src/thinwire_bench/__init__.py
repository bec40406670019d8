"""The evidence: benchmarks against other systems, studies, and the simulator against published tables.

Nothing of ``thinwire`` imports this package. It plugs its commands, ``thinwire bench`` and ``thinwire reproduce``, into
the command line by entry points.
"""

__all__ = ["__version__"]

__version__ = "0.2.0"

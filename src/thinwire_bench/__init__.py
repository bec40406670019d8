"""The evidence: benchmarks beside other systems, studies, and published tables beside the simulator.

Nothing of ``thinwire`` imports this package. It plugs its commands, ``thinwire bench`` and ``thinwire reproduce``, into
the command line by entry points.
"""

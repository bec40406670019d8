"""Tools for tests of code that runs on several ranks; shipped, because users need them too."""

from thinwire.testing.ranks import RankError, RankPool, run_ranks

__all__ = ["RankError", "RankPool", "run_ranks"]

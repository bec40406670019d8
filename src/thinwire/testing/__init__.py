"""Tools for tests of code that runs on several ranks, and of codecs; shipped, because users need them too."""

from thinwire.testing.codecs import check_codec
from thinwire.testing.ranks import RankError, RankPool, run_ranks

__all__ = ["RankError", "RankPool", "check_codec", "run_ranks"]

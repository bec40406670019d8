"""Tools for testing codecs and code that runs on several ranks; shipped with the package, because users need them."""

from thinwire.testing.codecs import check_codec
from thinwire.testing.ranks import RankError, RankPool, run_ranks

__all__ = ["RankError", "RankPool", "check_codec", "run_ranks"]

"""Tools for testing codecs and code that runs on several ranks; shipped with the package, because users need them."""

from thinwire.testing.codecs import check_codec
from thinwire.testing.ranks import RankError, RankPool, run_ranks
from thinwire.testing.streams import check_streams

__all__ = ["RankError", "RankPool", "check_codec", "check_streams", "run_ranks"]

"""Measures a cluster: collectives, codecs, computation, and how they slow each other down."""

from thinwire.profile.computing import Piece
from thinwire.profile.measure import Settings, measure

__all__ = ["Piece", "Settings", "measure"]

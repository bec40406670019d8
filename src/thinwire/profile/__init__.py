"""Measures a cluster: collectives, codecs, computation, and how they slow each other down."""

from thinwire.profile.computing import ModelPiece
from thinwire.profile.handling import Weightless
from thinwire.profile.measure import Settings, measure, memory_in_use, process_memory

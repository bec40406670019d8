"""The cost model: memory, and seconds of computation, codecs and collectives. Never imports torch."""

from thinwire.cost.collectives import CollectiveTimes, HopCollectives, LibraryCollectives, library_moves
from thinwire.cost.estimate import Busy, GroupShape, Pricer, Traffic, UnitKind
from thinwire.cost.measured import MeasuredLibrary, ProfiledCollectives, ProfiledRates
from thinwire.cost.memory import (
    AMSP_STATES,
    GPU_LOSS_CHUNK,
    HOST_LOSS_CHUNK,
    OVERHEAD,
    PEER_SYSTEMS,
    Memory,
    States,
    ZeroSettings,
    kept_activations,
    largest_memory,
    memory,
    peer_memory,
    working_memory,
)
from thinwire.cost.mixed import MixedRates, nominal_rates, views_of
from thinwire.cost.operations import PricedStage, moves
from thinwire.cost.rates import ALONE, Basis, Beside, Efficiency, NominalRates, Rates, Work
from thinwire.cost.shapes import ModelPart, alike, parts
from thinwire.cost.units import largest_share, units

__all__ = [
    "ALONE",
    "AMSP_STATES",
    "GPU_LOSS_CHUNK",
    "HOST_LOSS_CHUNK",
    "OVERHEAD",
    "PEER_SYSTEMS",
    "Basis",
    "Beside",
    "Busy",
    "Efficiency",
    "CollectiveTimes",
    "GroupShape",
    "HopCollectives",
    "LibraryCollectives",
    "ProfiledCollectives",
    "MeasuredLibrary",
    "Memory",
    "MixedRates",
    "PricedStage",
    "NominalRates",
    "ModelPart",
    "Pricer",
    "ProfiledRates",
    "Rates",
    "States",
    "Traffic",
    "UnitKind",
    "Work",
    "alike",
    "ZeroSettings",
    "kept_activations",
    "largest_memory",
    "largest_share",
    "library_moves",
    "memory",
    "moves",
    "nominal_rates",
    "parts",
    "peer_memory",
    "units",
    "views_of",
    "working_memory",
]

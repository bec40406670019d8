"""The cost model: memory, and seconds of computation, codecs and collectives. Never imports torch.

``shapes.py`` says what a model consists of (``blocks.py`` what a block does), and ``units.py`` how a plan cuts it.
Prices of parts, hops and codecs are :class:`Rates`: published (``rates.py``, with ``kernels.py`` and
``kernel_table.py``) or measured (``measured.py``). ``operations.py`` makes the stages of a program's operation of
them, ``collectives.py`` whole collectives, and ``estimate.py`` sums over a step. ``memory/`` counts bytes, and
``goodput.py`` what failures cost.
"""

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
from thinwire.cost.operations import PricedStage, moves
from thinwire.cost.rates import (
    ALONE,
    Basis,
    Beside,
    Efficiency,
    MixedRates,
    NominalRates,
    Rates,
    Work,
    nominal_rates,
    views_of,
)
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

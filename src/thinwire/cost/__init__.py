"""The cost model: memory, and seconds of computation, codecs and collectives. Never imports torch.

``shapes.py`` says what a model consists of (``blocks.py`` what a block does), and ``units.py`` how a plan cuts it.
Prices of parts, hops and codecs are :class:`Rates`: published (``rates.py``, with ``kernels.py`` and
``kernel_table.py``) or measured (``measured.py``). ``operations.py`` makes the stages of a program's operation of
them, ``collectives.py`` whole collectives, and ``estimate.py`` sums over a step. ``memory/`` counts bytes.
"""

from thinwire.cost.blocks import ModelPart
from thinwire.cost.collectives import CollectiveTimes, HopCollectives, LibraryCollectives, library_moves
from thinwire.cost.estimate import Busy, GroupShape, Pricer, ProcessGroups
from thinwire.cost.measured import MeasuredLibrary, ProfiledCollectives, ProfiledRates
from thinwire.cost.memory.activations import GPU_LOSS_CHUNK, HOST_LOSS_CHUNK, kept_activations, working_memory
from thinwire.cost.memory.peak import OVERHEAD, Memory, largest_memory, memory
from thinwire.cost.memory.peers import PEER_SYSTEMS, ZeroSettings, peer_memory
from thinwire.cost.memory.states import AMSP_STATES, States
from thinwire.cost.operations import PricedStage, moves
from thinwire.cost.rates import ALONE, Basis, Beside, Efficiency, NominalRates, Rates, Work
from thinwire.cost.shapes import alike, parts
from thinwire.cost.units import largest_share, units

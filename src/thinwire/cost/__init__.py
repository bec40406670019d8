"""What things take: memory, and seconds of computation, codecs and collectives. Never imports torch."""

from thinwire.cost.anatomy import Part, parts, units
from thinwire.cost.operations import Move, moves
from thinwire.cost.rates import Efficiency, NominalRates, Rates, Work

__all__ = ["Efficiency", "Move", "NominalRates", "Part", "Rates", "Work", "moves", "parts", "units"]

"""The simulator: prices the program that the runtime performs. Never imports torch."""

from thinwire.sim.cases import Answer, Case, answer, read_cases
from thinwire.sim.clock import Resource
from thinwire.sim.engines import ENGINES, Engine
from thinwire.sim.step import Simulated, Workload, simulate

__all__ = [
    "ENGINES",
    "Answer",
    "Case",
    "Engine",
    "Resource",
    "Simulated",
    "Workload",
    "answer",
    "read_cases",
    "simulate",
]

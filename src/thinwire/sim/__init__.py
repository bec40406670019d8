"""The simulator: it prices the program that the runtime performs. Never imports torch."""

from thinwire.sim.cases import Answer, Case, Slowed, answer, read_cases
from thinwire.sim.clock import Resource
from thinwire.sim.disturbed import Disturbance, Disturbed, disturbed
from thinwire.sim.engines import ENGINES, Engine
from thinwire.sim.step import Simulated, Workload, simulate

__all__ = [
    "ENGINES",
    "Answer",
    "Case",
    "Disturbance",
    "Disturbed",
    "Engine",
    "Resource",
    "Simulated",
    "Slowed",
    "Workload",
    "answer",
    "disturbed",
    "read_cases",
    "simulate",
]

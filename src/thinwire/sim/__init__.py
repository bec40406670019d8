"""The simulator: it prices the program that the runtime performs. Never imports torch."""

from thinwire.sim.cases import Answer, Case, Slowed, answer, read_cases
from thinwire.sim.clock import Resource
from thinwire.sim.disturbed import Disturbance, Disturbed, disturbed
from thinwire.sim.engine import Engine, engines
from thinwire.sim.step import Simulated, Workload, simulate

__all__ = [
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
    "engines",
    "read_cases",
    "simulate",
]

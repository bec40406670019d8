"""The simulator: prices the program that the runtime performs. Never imports torch."""

from thinwire.sim.engine import Resource
from thinwire.sim.step import Simulated, Workload, simulate

__all__ = ["Resource", "Simulated", "Workload", "simulate"]

"""AMSP's own objective (arXiv 2311.00257): its sums, an exact search for their optimum, and how that differs."""

from thinwire.plan.amsp.objectives import BothObjectives, UnderBoth, both_objectives
from thinwire.plan.amsp.solver import AmspPlan, amsp_flips, amsp_search
from thinwire.plan.amsp.sums import AmspSums, AmspTimes

__all__ = [
    "AmspPlan",
    "AmspSums",
    "AmspTimes",
    "BothObjectives",
    "UnderBoth",
    "amsp_flips",
    "amsp_search",
    "both_objectives",
]

"""The planner: rules, search, placement and explanation. Never imports torch."""

from thinwire.plan.amsp import AmspPlan, amsp_flips, amsp_search
from thinwire.plan.automatic import Chosen, Freedom, choose, profiled_job, replaced_keys, search_fitting
from thinwire.plan.basis import RestsOn, rests_on
from thinwire.plan.candidates import AxisSeconds, Candidate
from thinwire.plan.compare import Quantity, RunComparison, compare, refit
from thinwire.plan.explain import (
    Explanation,
    Flip,
    Remedy,
    binding,
    critical_path,
    explain,
    remedies,
    shortage,
    summary,
)
from thinwire.plan.island_plans import IslandPlan, island_plans
from thinwire.plan.loss_law import LAW_FILE, ExchangeWay, LossLaw, parse_budget
from thinwire.plan.objectives import BothObjectives, UnderBoth, both_objectives
from thinwire.plan.peers import PeerPlan, losses, nearest, predicted
from thinwire.plan.placement import (
    Placed,
    hostfile,
    leaf_numbers,
    place,
    placed,
    rankfile,
    slurm_hostfile,
)
from thinwire.plan.profiled import profiled_cluster
from thinwire.plan.renting import Offer, Rental, SweptNodes, cheapest, offers, parts_of, rentals, sweep_nodes
from thinwire.plan.rules import Cut
from thinwire.plan.search import CLASSICS, Search, Searched, candidate, search
from thinwire.plan.training_job import CODEC_LEVELS, CodecLevel, TrainingJob

__all__ = [
    "CLASSICS",
    "CODEC_LEVELS",
    "AmspPlan",
    "AxisSeconds",
    "Candidate",
    "Chosen",
    "CodecLevel",
    "RunComparison",
    "Cut",
    "ExchangeWay",
    "IslandPlan",
    "LAW_FILE",
    "LossLaw",
    "Explanation",
    "Flip",
    "Freedom",
    "TrainingJob",
    "Offer",
    "PeerPlan",
    "Placed",
    "Quantity",
    "Remedy",
    "Rental",
    "RestsOn",
    "Search",
    "Searched",
    "SweptNodes",
    "amsp_flips",
    "BothObjectives",
    "amsp_search",
    "UnderBoth",
    "both_objectives",
    "binding",
    "candidate",
    "choose",
    "cheapest",
    "compare",
    "critical_path",
    "explain",
    "hostfile",
    "island_plans",
    "parse_budget",
    "profiled_job",
    "search_fitting",
    "leaf_numbers",
    "losses",
    "nearest",
    "offers",
    "parts_of",
    "place",
    "placed",
    "profiled_cluster",
    "predicted",
    "rankfile",
    "refit",
    "remedies",
    "replaced_keys",
    "rentals",
    "rests_on",
    "search",
    "shortage",
    "slurm_hostfile",
    "summary",
    "sweep_nodes",
]

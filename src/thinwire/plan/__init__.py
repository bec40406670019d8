"""The planner: rules, search, placement and explanation. Never imports torch.

The way of a plan, in the order in which to read it:

1. ``training_job.py``: what is asked, and ``rules.py``: which plans are valid.
2. ``space/``: every valid plan as a candidate. ``batches.py`` and ``state_bytes.py`` say what fits; ``traffic.py``
   prices communication, and ``bounds.py`` makes a lower bound of the step of it.
3. ``priced.py``: a plan with its simulated step, its memory, and what both rest on.
4. ``search.py``: simulates candidates in the order of their bounds until none can be better; ``refine.py`` turns what
   is left to turn on the best one.

Everything else asks the search: why (``explain.py``), where (``placement.py``, ``renting.py``), for a run
(``automatic.py``), after it (``compare.py``), with experts or islands, beside other frameworks (``peers.py``), and
under AMSP's objective (``amsp/``).
"""

from thinwire.plan.amsp import (
    AmspPlan,
    AmspSums,
    AmspTimes,
    BothObjectives,
    UnderBoth,
    amsp_flips,
    amsp_search,
    both_objectives,
)
from thinwire.plan.automatic import Chosen, Freedom, choose, profiled_job, replaced_keys, search_fitting
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
from thinwire.plan.islands import LAW_FILE, ExchangeWay, IslandPlan, LossLaw, island_plans, parse_budget
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
from thinwire.plan.priced import AxisSeconds, PricedPlan, Provenance, price_plan, provenance
from thinwire.plan.profiled import profiled_cluster
from thinwire.plan.renting import Offer, Rental, SweptNodes, cheapest, offers, parts_of, rentals, sweep_nodes
from thinwire.plan.rules import Cut
from thinwire.plan.search import CLASSICS, Search, Searched, search
from thinwire.plan.training_job import CODEC_LEVELS, CodecLevel, TrainingJob

__all__ = [
    "CLASSICS",
    "CODEC_LEVELS",
    "AmspPlan",
    "AmspSums",
    "AmspTimes",
    "AxisSeconds",
    "Candidate",
    "PricedPlan",
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
    "Provenance",
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
    "price_plan",
    "placed",
    "profiled_cluster",
    "predicted",
    "rankfile",
    "refit",
    "remedies",
    "replaced_keys",
    "rentals",
    "rests_on",
    "provenance",
    "search",
    "shortage",
    "slurm_hostfile",
    "summary",
    "sweep_nodes",
]

# The names of version 0.2, for one release.
Candidate = PricedPlan
candidate = price_plan
rests_on = provenance

"""The planner: rules, search, placement and explanation. Never imports torch."""

from thinwire.plan.amsp import AmspPlan, amsp_flips, amsp_search
from thinwire.plan.explain import Explanation, Flip, Remedy, critical_path, explain, remedies, shortage, summary
from thinwire.plan.job import CODEC_LEVELS, Candidate, CodecLevel, Job, Objective, profiled_cluster
from thinwire.plan.search import CLASSICS, Search, Searched, candidate, search

__all__ = [
    "CLASSICS",
    "CODEC_LEVELS",
    "AmspPlan",
    "Candidate",
    "CodecLevel",
    "Explanation",
    "Flip",
    "Job",
    "Objective",
    "Remedy",
    "Search",
    "Searched",
    "amsp_flips",
    "amsp_search",
    "candidate",
    "critical_path",
    "explain",
    "profiled_cluster",
    "remedies",
    "search",
    "shortage",
    "summary",
]

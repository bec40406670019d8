"""The planner: rules, search, placement and explanation. Never imports torch.

The way of a plan, in the order in which to read it:

1. ``training_job.py``: what is asked, and ``rules.py``: which plans are valid.
2. ``space/``: every valid plan as a candidate. ``batches.py`` says what fits; ``traffic.py`` prices communication, and
   ``bounds.py`` makes a lower bound of the step of it.
3. ``priced.py``: a plan with its simulated step, its memory, and what both rest on.
4. ``search.py``: simulates candidates in the order of their bounds until none can be better; ``refine.py`` turns what
   is left to turn on the best one.

Everything else asks the search: why (``explain.py``), where (``placement.py``, ``renting.py``), for a run
(``automatic.py``, ``finalists.py``), after it (``after/``), with islands (``loss_budget.py``), beside other frameworks
(``peers.py``), and under AMSP's objective (``amsp/``).
"""

from thinwire.plan.after.compare import RunComparison, compare, compare_expected
from thinwire.plan.after.culprit import Culprit, culprit
from thinwire.plan.after.expected import expectation
from thinwire.plan.after.refit import Refit, refit
from thinwire.plan.amsp.objectives import BothObjectives, UnderBoth, both_objectives
from thinwire.plan.amsp.solver import AmspPlan, amsp_flips, amsp_search
from thinwire.plan.amsp.sums import AmspSums
from thinwire.plan.automatic import Chosen, Freedom, choose, lossy_codecs, profiled_job, replaced_keys
from thinwire.plan.explain import Explanation, binding, critical_path, explain, remedies, shortage, summary
from thinwire.plan.finalists import finalists
from thinwire.plan.loss_budget import IslandPlan, LossLaw, island_plans, parse_budget
from thinwire.plan.peers import losses, nearest
from thinwire.plan.placement import hostfile, leaf_numbers, place, placed, rankfile, slurm_hostfile
from thinwire.plan.priced import AxisSeconds, PricedPlan, Provenance, price_plan, provenance
from thinwire.plan.renting import Rental, SweptNodes, offers, parts_of, rentals, sweep_nodes
from thinwire.plan.search import RESIDENCES, Search, Searched, search, search_wider
from thinwire.plan.training_job import CODEC_LEVELS, CodecLevel, TrainingJob, profiled_cluster
from thinwire.spec.cut import Cut

# The names of version 0.2, for one release.
Candidate = PricedPlan
candidate = price_plan
rests_on = provenance

"""Plans with islands: which loss they cost by a law, and which of them is the fastest for a loss."""

from thinwire.plan.islands.loss_law import LAW_FILE, ExchangeWay, LossLaw, parse_budget
from thinwire.plan.islands.plans import IslandPlan, island_plans

__all__ = ["LAW_FILE", "ExchangeWay", "IslandPlan", "LossLaw", "island_plans", "parse_budget"]

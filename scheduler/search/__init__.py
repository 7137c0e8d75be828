"""The search for the best plan of one job."""

from scheduler.search._batches import BatchPlanner, TriedBatches, differences, tried_batches
from scheduler.search._evaluation import MOST_OFF, EvaluatedPlans, Ints, PlanEvaluation, PlanIndex
from scheduler.search._search import PlanCriteria, PlanSearch, Spread

__all__ = [
    "MOST_OFF",
    "BatchPlanner",
    "EvaluatedPlans",
    "Ints",
    "PlanCriteria",
    "PlanEvaluation",
    "PlanIndex",
    "PlanSearch",
    "Spread",
    "TriedBatches",
    "differences",
    "tried_batches",
]

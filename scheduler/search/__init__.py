"""The search for the best plan of one job."""

from scheduler.search._evaluation import MOST_OFF, Evaluated, Evaluation, Ints, Place
from scheduler.search._search import Limits, Search, Spread

__all__ = ["MOST_OFF", "Evaluated", "Evaluation", "Ints", "Limits", "Place", "Search", "Spread"]

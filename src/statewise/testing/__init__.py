"""The public test battery for losses, weights, selectors and other components; `statewise check FILE.py` runs it.

from statewise.testing import battery
for check in battery(MyLoss()):
    assert check.passed, check.detail
"""

from statewise.testing.battery import Check, battery
from statewise.testing.fixtures import rollouts, tiny_learner

__all__ = ["Check", "battery", "rollouts", "tiny_learner"]

"""Signals: what information arrives at a state. Importing registers the built-in kinds."""

from statewise.signals.behavior import Behavior
from statewise.signals.gold import Gold
from statewise.signals.preference import Preference
from statewise.signals.reference import Reference
from statewise.signals.reward import Reward
from statewise.signals.teacher import Teacher

__all__ = ["Behavior", "Gold", "Preference", "Reference", "Reward", "Teacher"]

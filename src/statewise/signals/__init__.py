"""Signals: what information arrives at a state. Importing registers the built-in kinds."""

from statewise.signals.behavior import Behavior
from statewise.signals.gold import Gold
from statewise.signals.reference import Reference

__all__ = ["Behavior", "Gold", "Reference"]

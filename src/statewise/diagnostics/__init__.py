"""Diagnostics: what is looked at while a run trains, and tables made from what it leaves."""

from statewise.diagnostics.geometry import Geometry

__all__ = ["Geometry"]

"""Losses, by formula. Importing registers the built-in kinds."""

from statewise.losses.divergence import ReferenceKL
from statewise.losses.nll import NLL
from statewise.losses.policy_gradient import Clip

__all__ = ["NLL", "Clip", "ReferenceKL"]

"""Losses, by formula. Importing registers the built-in kinds."""

from statewise.losses.divergence import ReferenceKL, StudentTeacherKL, TeacherJSD, TeacherStudentKL
from statewise.losses.nll import NLL
from statewise.losses.policy_gradient import CISPO, GSPO, Clip, Reinforce

__all__ = [
    "CISPO",
    "GSPO",
    "NLL",
    "Clip",
    "ReferenceKL",
    "Reinforce",
    "StudentTeacherKL",
    "TeacherJSD",
    "TeacherStudentKL",
]

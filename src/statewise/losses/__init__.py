"""Losses, by formula. Importing registers the built-in kinds."""

from statewise.losses.divergence import ReferenceKL, StudentTeacherKL, TeacherJSD, TeacherStudentKL
from statewise.losses.estimators import SampledReferenceKL
from statewise.losses.nll import NLL
from statewise.losses.policy_gradient import CISPO, GSPO, Clip, Reinforce
from statewise.losses.preference import DPO, IPO, SimPO

__all__ = [
    "CISPO",
    "DPO",
    "GSPO",
    "IPO",
    "NLL",
    "Clip",
    "ReferenceKL",
    "Reinforce",
    "SampledReferenceKL",
    "SimPO",
    "StudentTeacherKL",
    "TeacherJSD",
    "TeacherStudentKL",
]

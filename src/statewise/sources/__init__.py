"""Sources: whose states are visited. Importing registers the built-in kinds."""

from statewise.sources.continuation import ContinuationSource
from statewise.sources.dataset import DatasetSource
from statewise.sources.hinted import HintedSource
from statewise.sources.mixture import Mixture
from statewise.sources.pairs import PairsSource
from statewise.sources.policy import PolicySource
from statewise.sources.rejection import RejectionSource
from statewise.sources.replay import Replay
from statewise.sources.teacher import TeacherSource

__all__ = [
    "ContinuationSource",
    "DatasetSource",
    "HintedSource",
    "Mixture",
    "PairsSource",
    "PolicySource",
    "RejectionSource",
    "Replay",
    "TeacherSource",
]

"""Sources: whose states are visited. Importing registers the built-in kinds."""

from statewise.sources.dataset import DatasetSource
from statewise.sources.policy import PolicySource

__all__ = ["DatasetSource", "PolicySource"]

"""Sources: whose states are visited. Importing registers the built-in kinds."""

from statewise.sources.dataset import DatasetSource

__all__ = ["DatasetSource"]

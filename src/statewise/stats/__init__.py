"""Pure mathematics of measurements: intervals, paired tests, bootstrap; and the statistics of tokens."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "token_stats": "statewise.models.score",
    "Interval": "statewise.stats.hypothesis",
    "wilson": "statewise.stats.hypothesis",
    "mean_se": "statewise.stats.hypothesis",
    "mean_interval": "statewise.stats.hypothesis",
    "clustered_se": "statewise.stats.hypothesis",
    "mcnemar": "statewise.stats.hypothesis",
    "paired_t": "statewise.stats.hypothesis",
    "paired_permutation": "statewise.stats.hypothesis",
    "holm": "statewise.stats.hypothesis",
    "bootstrap_mean": "statewise.stats.bootstrap",
    "bootstrap_difference": "statewise.stats.bootstrap",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'statewise.stats' has no attribute {name!r}")

"""Pure mathematics of measurements: intervals, paired tests, power, bootstrap; and the statistics of tokens."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "token_stats": "statewise.models.score",
    "Interval": "statewise.stats.hypothesis",
    "wilson": "statewise.stats.hypothesis",
    "mean_se": "statewise.stats.hypothesis",
    "mean_interval": "statewise.stats.hypothesis",
    "clustered_se": "statewise.stats.hypothesis",
    "discordant": "statewise.stats.hypothesis",
    "mcnemar": "statewise.stats.hypothesis",
    "paired_t": "statewise.stats.hypothesis",
    "paired_permutation": "statewise.stats.hypothesis",
    "holm": "statewise.stats.hypothesis",
    "bootstrap_mean": "statewise.stats.bootstrap",
    "bootstrap_difference": "statewise.stats.bootstrap",
    "bootstrap_ratio": "statewise.stats.bootstrap",
    "bootstrap_seeds": "statewise.stats.bootstrap",
    "mcnemar_power": "statewise.stats.power",
    "mcnemar_items": "statewise.stats.power",
    "mcnemar_delta": "statewise.stats.power",
    "t_items": "statewise.stats.power",
    "spearman": "statewise.stats.rank",
    "spearman_interval": "statewise.stats.rank",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'statewise.stats' has no attribute {name!r}")

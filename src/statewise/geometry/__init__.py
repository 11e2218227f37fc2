"""What training did to the weights: pairs of checkpoints compared matrix by matrix, without building a model.

>>> from statewise import geometry
>>> comparison = geometry.prepare(["W0", "W1"], geometry.Selection(), geometry.Settings(tiers=("support",)))
>>> rows = geometry.run(comparison)
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Settings": "statewise.geometry.origin",
    "TIERS": "statewise.geometry.origin",
    "Origin": "statewise.geometry.origin",
    "Selection": "statewise.geometry.matrices",
    "Matrix": "statewise.geometry.matrices",
    "Checkpoint": "statewise.geometry.checkpoints",
    "Weights": "statewise.geometry.checkpoints",
    "open_checkpoint": "statewise.geometry.checkpoints",
    "prepare": "statewise.geometry.compare",
    "run": "statewise.geometry.compare",
    "decompose": "statewise.geometry.spectrum",
    "leading": "statewise.geometry.krylov",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'statewise.geometry' has no attribute {name!r}")

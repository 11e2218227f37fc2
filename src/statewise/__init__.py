"""statewise: train, measure and compare post-training by whose states a model is trained on.

The public names are imported lazily, so that `import statewise` costs nothing and loads no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "train": "statewise.training.loop",
    "score": "statewise.onpolicy.scoring",
    "detect": "statewise.onpolicy.detect",
    "filter_data": "statewise.onpolicy.filtering",
    "Recipe": "statewise.recipe",
    "RunDir": "statewise.run",
    "Component": "statewise.component",
    "Source": "statewise.component",
    "Signal": "statewise.component",
    "Loss": "statewise.component",
    "Weight": "statewise.component",
    "Selector": "statewise.component",
    "Task": "statewise.component",
    "Diagnostic": "statewise.component",
    "Verifier": "statewise.verifier",
    "Batch": "statewise.types",
    "Example": "statewise.types",
    "Rollout": "statewise.types",
    "Segment": "statewise.types",
    "TokenStats": "statewise.types",
    "World": "statewise.types",
}
_MODULES = ("stats", "weights", "losses", "evals", "testing", "tiny", "objective", "models", "sources", "signals")

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return import_module(f"statewise.{name}")
    raise AttributeError(f"module 'statewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS, *_MODULES])

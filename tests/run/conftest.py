"""A recipe with a source that needs no data."""

from typing import Any, ClassVar

import pytest

from statewise.component import Source
from statewise.recipe import Recipe


class Nothing(Source, kind="nothing_for_run_tests"):
    """Has gold tokens and gives none."""

    writes: ClassVar[tuple[str, ...]] = ("gold",)
    path: str = ""

    def sample(self, step: int, num_rollouts: int, world: Any) -> list[Any]:
        return []


@pytest.fixture
def recipe() -> Recipe:
    plain = {
        "source": {"kind": "nothing_for_run_tests", "path": "data.jsonl"},
        "signal": ["gold"],
        "objective": [{"loss": "nll"}],
        "budget": {"max_steps": 10},
        "seed": 7,
    }
    return Recipe.from_plain(plain, name="words")

"""Faults of plug-ins in a run: the message names the component whose fault it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from statewise.component import Signal, Source, Weight
from statewise.errors import DataError, NonFiniteLoss
from statewise.recipe import Recipe
from statewise.sources.dataset import DatasetSource
from statewise.training.loop import train
from statewise.verifier import Verifier


class Forgets(Signal, kind="test_forgets"):
    writes: ClassVar = ("test_hope",)

    def annotate(self, rollouts: Any, world: Any) -> Any:
        pass


class Promises(Signal, kind="test_promises"):
    writes: ClassVar = ("test_hope",)


class PromisesDense(Promises, kind="test_promises_in_attach"):
    def attach(self, batch: Any, world: Any) -> Any:
        return replace(batch)


class Nowhere(Signal, kind="test_nan"):
    writes: ClassVar = ("test_hope",)

    def annotate(self, rollouts: Any, world: Any) -> Any:
        return [r.with_columns(test_hope=[float("nan")] * r.num_tokens) for r in rollouts]


class Hopeful(Weight, kind="test_hopeful"):
    reads: ClassVar = ("test_hope",)

    def __call__(self, stats: Any, batch: Any) -> torch.Tensor:
        return batch.column("test_hope")


class Dicts(Source, kind="test_dicts"):
    writes: ClassVar = ("gold",)

    def sample(self, step: int, num_rollouts: int, world: Any) -> Any:
        return [{"prompt": "a"}] * num_rollouts


class Generous(DatasetSource, kind="test_generous"):
    def sample(self, step: int, num_rollouts: int, world: Any) -> Any:
        return super().sample(step, num_rollouts + 3, world)


class Praises(Verifier, kind="test_praises"):
    def score(self, text: str, example: Any) -> Any:
        return "good"


def fails(plain: dict[str, Any], path: Path, **changes: Any) -> str:
    with pytest.raises((DataError, NonFiniteLoss)) as caught:
        train(Recipe.from_plain({**plain, **changes}, name="small"), path / "run", quiet=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        ("test_forgets", "signal 'test_forgets': annotate returned None, expected a list of Rollouts"),
        ("test_promises", "signal 'test_promises': declares 'test_hope' in `writes` and did not write it"),
        ("test_promises_in_attach", "signal 'test_promises_in_attach': declares 'test_hope'"),
        ("test_nan", "NaN or infinite where it is trained: column 'test_hope' of signal 'test_nan'"),
    ],
)
def test_a_signal_s_fault(plain: dict[str, Any], tmp_path: Path, signal: str, expected: str):
    objective = [{"loss": "nll", "weight": "test_hopeful"}]
    said = fails(plain, tmp_path, signal=["gold", signal], objective=objective)
    assert expected in said
    assert "learning rate" not in said


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"kind": "test_dicts"},
            "source 'test_dicts': sample returned a list whose item 0 is a dict, expected a Rollout",
        ),
        (
            {"kind": "test_generous", "data": "tiny:math", "count": 24},
            "source 'test_generous': sample returned 11 rollouts",
        ),
    ],
)
def test_a_source_s_fault(plain: dict[str, Any], tmp_path: Path, source: dict[str, Any], expected: str):
    assert expected in fails(plain, tmp_path, source=source, objective=["nll"])


def test_a_verifier_that_returns_text(plain: dict[str, Any], tmp_path: Path):
    source = {"kind": "policy", "data": "tiny:math", "count": 24, "group_size": 4, "max_tokens": 4}
    said = fails(
        plain, tmp_path, source=source, signal=[{"kind": "reward", "verifier": "test_praises"}], objective=["clip"]
    )
    assert "verifier 'test_praises' on sample" in said
    assert "must return a number (or bool), received 'good'" in said

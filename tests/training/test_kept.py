"""Completions of a teacher that another run had sampled."""

from pathlib import Path

import pytest
from tests.training.conftest import weights_of
from tests.training.test_teachers import small
from tests.training.test_teachers import teacher_dir as teacher_dir

from statewise.errors import RecipeError
from statewise.models.generate import InProcessSampler
from statewise.recipe import Recipe
from statewise.training.kept import kept
from statewise.training.loop import train
from statewise.types import Completion, Sampling

ANSWER = [Completion((1, 2), (-0.1, -1 / 3), "stop")]


def test_an_answer_is_kept_exactly_and_asked_for_once(tmp_path: Path) -> None:
    sampling = Sampling(8, seed=3)
    assert kept(tmp_path, [[5, 6]], sampling, [0], lambda: ANSWER) == (ANSWER, False)
    assert kept(tmp_path, [[5, 6]], sampling, [0], list) == (ANSWER, True)


@pytest.mark.parametrize(
    ("prompts", "sampling", "rows"),
    [([[5, 7]], Sampling(8, seed=3), [0]), ([[5, 6]], Sampling(8, seed=4), [0]), ([[5, 6]], Sampling(8, seed=3), [1])],
)
def test_anything_else_is_asked_for(
    prompts: list[list[int]], sampling: Sampling, rows: list[int], tmp_path: Path
) -> None:
    kept(tmp_path, [[5, 6]], Sampling(8, seed=3), [0], lambda: ANSWER)
    assert kept(tmp_path, prompts, sampling, rows, list) == ([], False)


def test_a_broken_file_is_made_again(tmp_path: Path) -> None:
    kept(tmp_path, [[5]], Sampling(8), None, lambda: ANSWER)
    (file,) = tmp_path.iterdir()
    file.write_text("[[")
    assert kept(tmp_path, [[5]], Sampling(8), None, lambda: ANSWER) == (ANSWER, False)


def test_a_run_with_kept_completions_ends_with_the_same_bytes_and_counts(
    model_dir: Path, teacher_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *changes: str) -> tuple[bytes, dict[str, float]]:
        done = train(small("opd_off_policy", model_dir, teacher_dir, *changes), tmp_path / name, quiet=True)
        spent = {k: v for k, v in done.info["spent"].items() if k != "seconds"}
        return weights_of(done.path, max(done.checkpoints())), spent

    cache = f"source.cache={tmp_path / 'kept'}"
    plain, first = run("plain"), run("first", cache)
    monkeypatch.setattr(InProcessSampler, "generate", None)  # nothing is sampled any more
    assert plain == first == run("second", cache)


def test_a_moving_teacher_is_not_kept() -> None:
    with pytest.raises(RecipeError, match="'ema' has other weights after every update"):
        Recipe.load("opd_off_policy", ["source.teacher={path='ema',decay=0.9}", "source.cache=x"])

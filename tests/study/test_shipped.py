"""The studies of the repository can be planned."""

from pathlib import Path

import pytest

from statewise.study.plan import make_plan

FILES = sorted((Path(__file__).parents[2] / "studies").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_can_be_planned(file: Path) -> None:
    plan = make_plan(file)
    assert plan.study.about
    assert len({job.key for job in plan.jobs}) == len(plan.jobs)

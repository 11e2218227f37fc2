"""Arms, axes, seeds, teachers and budgets, as recipes in the right order."""

from pathlib import Path

import pytest

from statewise.errors import RecipeError
from statewise.study.plan import Plan, make_plan, references, resolve


def edited(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def arms(plan: Plan) -> list[tuple[str, int]]:
    return [(job.arm, job.seed) for job in plan.jobs]


def test_teachers_come_first_and_seeds_match(study_file: Path) -> None:
    plan = make_plan(study_file)
    assert arms(plan) == [("mild", 0), ("mild", 1), ("stress", 0), ("stress", 1), ("student", 0), ("student", 1)]
    assert plan.by_arm["student", 1].needs == (("stress", 1),)
    assert plan.out == study_file.with_suffix("")


def test_a_teacher_of_one_seed_serves_all(study_file: Path) -> None:
    plan = make_plan(edited(study_file, "arm:stress", "arm:stress@0"))
    assert plan.by_arm["student", 1].needs == (("stress", 0),)


def test_one_budget_and_the_same_tasks_for_all(study_file: Path) -> None:
    plan = make_plan(study_file)
    assert {job.recipe.budget.max_steps for job in plan.jobs} == {3}
    assert {len(job.recipe.eval.tasks) for job in plan.jobs} == {2}
    assert [recipe.budget.max_steps for recipe in plan.bases.values()] == [0]
    assert not any(job.own_budget for job in plan.jobs)
    other = make_plan(edited(study_file, "[arms.mild]", "[arms.mild]\nbudget = { max_steps = 5 }"))
    assert other.by_arm["mild", 0].recipe.budget.max_steps == 5
    assert other.by_arm["mild", 0].own_budget


def test_identity_is_of_the_work_alone(study_file: Path) -> None:
    plan, again = make_plan(study_file), make_plan(study_file, "elsewhere")
    assert [job.key for job in plan.jobs] == [job.key for job in again.jobs]
    changed = make_plan(edited(study_file, "optim.lr=1e-2", "optim.lr=2e-2"))
    same = {key for key in changed.by_key if key in plan.by_key}
    assert {changed.by_key[key].arm for key in same} == {"mild"}  # the student's teacher is another one, so it is too


def test_a_smaller_version_is_made_on_the_command_line(study_file: Path) -> None:
    plan = make_plan(
        study_file, None, ["seeds=[3]", "budget.max_steps=1", "tasks.0.limit=2", 'arms.stress.set.0="optim.lr=5e-3"']
    )
    assert arms(plan) == [("mild", 3), ("stress", 3), ("student", 3)]
    assert {job.recipe.budget.max_steps for job in plan.jobs} == {1}
    assert plan.by_arm["mild", 3].recipe.eval.tasks[0].limit == 2
    assert plan.by_arm["stress", 3].recipe.optim.lr == 5e-3
    with pytest.raises(RecipeError, match=r"override 'seed=\[0\]': unknown key 'seed'; did you mean 'seeds'"):
        make_plan(study_file, None, ["seed=[0]"])


def test_axes_are_crossed(study_file: Path) -> None:
    edited(study_file, "[arms.mild]", '[arms.mild]\naxes = { "optim.lr" = [1e-3, 0.5], "batch.rollouts" = [4, 8] }')
    plan = make_plan(study_file)
    names = [name for name, seed in arms(plan) if seed == 0]
    assert names[:4] == [
        "mild-lr=0.001-rollouts=4",
        "mild-lr=0.001-rollouts=8",
        "mild-lr=0.5-rollouts=4",
        "mild-lr=0.5-rollouts=8",
    ]
    assert plan.by_arm["mild-lr=0.5-rollouts=8", 0].recipe.optim.lr == 0.5
    assert plan.by_arm["mild-lr=0.5-rollouts=8", 0].recipe.batch.rollouts == 8


def test_what_is_set_for_all_passes_an_arm_by_that_stands_alone(study_file: Path) -> None:
    edited(study_file, "seeds = [0, 1]", 'seeds = [0]\nset = ["batch.rollouts=2"]\naxes = { "optim.lr" = [0.1, 0.2] }')
    edited(study_file, "[arms.mild]", "[arms.mild]\nalone = true")
    edited(study_file, "arm:stress", "arm:mild")
    edited(study_file, 'versus = "stress"', 'versus = "mild"')
    plan = make_plan(study_file)
    assert len(plan.jobs) == 5
    assert plan.by_arm["mild", 0].recipe.batch.rollouts == 4
    assert plan.by_arm["student-lr=0.2", 0].recipe.batch.rollouts == 2


def test_axes_without_arms_are_the_arms(study_file: Path) -> None:
    text = 'base = "base.toml"\ntarget = "tiny:math"\ntasks = ["tiny:math"]\naxes = { "optim.lr" = [1e-3, 1e-4] }'
    study_file.write_text(text)
    assert arms(make_plan(study_file)) == [("lr=0.001", 0), ("lr=0.0001", 0)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("arm:stress", "arm:stres", "did you mean 'stress'"),
        ("arm:stress", "arm:stress@7", "but arm 'stress' has no seed 7"),
        ("arm:stress", "arm:student", "student waits for itself"),
        ('target = "tiny:math"', 'target = "math"', "target: no task 'math'"),
        ('versus = "stress"', 'versus = "stres"', "versus: no arm 'stres'"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "none twice"),
        ("seeds = [0, 1]", "seeds = []", "at least one seed"),
        ("[arms.mild]", '[arms."a/b"]', "received the name 'a/b'"),
        ("[arms.mild]", "[arms.base]", "the untrained model"),
        ("optim.lr=1e-2", "optim.lrr=1e-2", "arms.stress: .*unknown key"),
        ("[arms.mild]", '[arms.mild]\naxes = { "optim.lr" = [] }', "axes.optim.lr: is empty"),
        ("budget =", "bugdet =", "did you mean 'budget'"),
        ('base = "base.toml"', 'base = "nothing"', "no recipe 'nothing'"),
        ("[arms.mild]", "[arms.mild]\nset = ['eval.tasks=[\"tiny:text\"]']", "other eval.tasks"),
    ],
)
def test_what_has_no_meaning_is_refused(study_file: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_plan(edited(study_file, old, new))


def test_references_are_found_and_resolved_anywhere() -> None:
    plain = {"signal": [{"teacher": "arm:a"}, {"teacher": {"path": "arm:b@3"}}], "other": "harm:a", "n": 1}
    assert list(references(plain)) == [("a", None), ("b", 3)]
    assert resolve(plain, {("a", None): "x", ("b", 3): "y"}) == {
        "signal": [{"teacher": "x"}, {"teacher": {"path": "y"}}],
        "other": "harm:a",
        "n": 1,
    }


def test_arms_that_start_from_an_arm_are_compared_with_its_base(study_file: Path) -> None:
    plan = make_plan(edited(study_file, "[arms.mild]", "[arms.mild]\nset = ['model.path=\"arm:stress\"']"))
    assert len(plan.bases) == 1
    assert plan.by_arm["mild", 0].needs == (("stress", 0),)

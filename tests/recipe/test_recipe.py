"""Recipes: TOML both ways, hash, overrides, and refusals with what was received, what was expected, how to mend it."""

from pathlib import Path

import pytest

from statewise.component import Loss, load_plugin, parse
from statewise.errors import RecipeError
from statewise.recipe import Recipe, shipped_recipes

PLAIN = {
    "source": {"kind": "dataset", "data": "tiny:math", "count": 8},
    "signal": ["gold"],
    "objective": [{"loss": "nll", "weight": {"kind": "cll", "beta": 0.5}}],
    "budget": {"max_steps": 3},
}


def make(overrides: tuple[str, ...] = (), **changes: object) -> Recipe:
    return Recipe.from_plain({**PLAIN, **changes}, overrides)


def message(*overrides: str, **changes: object) -> str:
    with pytest.raises(RecipeError) as caught:
        make(overrides, **changes)
    return str(caught.value)


def test_toml_round_trip_and_hash(tmp_path: Path):
    recipe = make(("optim.lr=3e-4", "model.adapter.rank=8", "eval.tasks=['tiny:math']"))
    file = tmp_path / "again.toml"
    file.write_text(recipe.to_toml())
    again = Recipe.load(file)
    assert again.to_plain() == recipe.to_plain() and again.hash == recipe.hash
    assert again.objective[0].weight.beta == 0.5 and again.model.adapter.rank == 8
    assert make(("seed=1",)).hash != recipe.hash


def test_what_is_a_default_is_not_written():
    text = make(("model.attention=auto", "diagnostics=[]", "objective.0.on=actions", "batch.rollouts=32")).to_toml()
    for word in ("[model]", "diagnostics", "on =", "[batch]"):
        assert word not in text, text
    assert "adapter = {}" in make(("model.adapter={}",)).to_toml()  # a LoRA of default settings is no default
    assert 'on = { kind = "random", share = 0.5 }' in make(("objective.0.on={kind='random', share=0.5}",)).to_toml()


def test_defaults_spelled_out_do_not_change_the_hash():
    assert make(("optim.lr=1e-4", "batch.rollouts=32")).hash == make().hash
    assert make(("optim.lr=1e-4", "batch.rollouts=32")).identity == make().identity != make(("seed=1",)).identity


def test_a_new_setting_with_a_default_keeps_the_identity(monkeypatch: pytest.MonkeyPatch):
    recipe = make()
    before = recipe.identity, recipe.hash
    dump = Recipe.model_dump

    def with_more(self: Recipe, **options: object) -> dict[str, object]:
        return {**dump(self, **options), **({} if options.get("exclude_defaults") else {"new": 1})}

    monkeypatch.setattr(Recipe, "model_dump", with_more)
    assert recipe.identity == before[0]
    assert recipe.hash != before[1]


def test_hash_follows_the_text_of_a_plugin(tmp_path: Path):
    plugin = tmp_path / "scaled_hash_test.py"
    body = (
        "from statewise import Weight\n"
        "class Scaled(Weight, kind='scaled_for_hash'):\n"
        "    needs = ('logprobs',)\n"
        "    def __call__(self, stats, batch):\n"
        "        return stats.logprobs.exp() * {}\n"
    )
    hashes = []
    for factor in (1, 2):
        plugin.write_text(body.format(factor))
        plain = {**PLAIN, "plugins": [plugin.name], "objective": [{"loss": "nll", "weight": "scaled_for_hash"}]}
        hashes.append(Recipe.from_plain(plain, base_dir=tmp_path).hash)
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_load(name: str):
    recipe = Recipe.load(name)
    assert Recipe.from_plain(recipe.to_plain()).hash == recipe.hash
    assert all(line.strip() for line in recipe.explain())


def test_overrides_reach_what_a_kind_alone_is_short_for():
    plain = {**PLAIN, "objective": ["nll"], "signal": ["gold"]}
    recipe = Recipe.from_plain(
        plain, ["objective.0.weight=cll", "objective.0.weight.gamma_max=1.5", "eval.tasks=['tiny:math']"]
    )
    assert recipe.objective[0].weight.gamma_max == 1.5 and recipe.objective[0].loss.kind == "nll"
    recipe = Recipe.from_plain(recipe.to_plain() | {"eval": {"tasks": ["tiny:math"]}}, ["eval.tasks.0.count=7"])
    assert recipe.eval.tasks[0].count == 7
    with pytest.raises(RecipeError, match=r"'model\.path' is 'tiny', not a table"):
        Recipe.from_plain({**PLAIN, "model": {"path": "tiny"}}, ["model.path.rank=8"])


def test_overrides_reach_list_items_and_new_tables():
    recipe = make(("objective.0.coef=0.5", "objective.0.weight.gamma_max=1.5", "checkpoint.every=2"))
    assert recipe.objective[0].coef == 0.5
    assert recipe.objective[0].weight.gamma_max == 1.5
    assert recipe.checkpoint.every == 2


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("optim.learning_rate=1",), ("optim.learning_rate", "unknown key")),
        (("optmi.lr=1",), ("optmi", "did you mean 'optim'")),
        (("optim.lr=fast",), ("optim.lr", "'fast'")),
        (("optim.schedule=cosin",), ("optim.schedule", "cosin", "cosine")),
        (("objective.0.loss=nl",), ("objective", "unknown loss 'nl'", "nll")),
        (("objective.0.weight.beta=0",), ("beta", "0", "greater than 0")),
        (("objective.0.weight.betta=1",), ("betta", "did you mean 'beta'")),
        (("batch.rollouts=10", "batch.minibatches=4"), ("batch.minibatches = 4", "batch.rollouts = 10")),
        (("budget={}",), ("budget", "max_steps")),
        (("checkpoint.keep_best=math",), ("checkpoint.keep_best", "eval.tasks")),
        (("objective.0.coef=0",), ("objective", "nothing would be trained")),
        (("objective.0.reduce=fixed_length",), ("length", "fixed_length")),
    ],
)
def test_bad_settings_are_refused_by_name(overrides: tuple[str, ...], parts: tuple[str, ...]):
    text = message(*overrides)
    for part in parts:
        assert part in text, text


def test_a_column_that_nobody_writes_is_refused_and_the_writer_named():
    text = message(objective=[{"loss": "nll", "weight": "importance"}])
    assert "reference_logprobs" in text and "signal 'reference'" in text
    assert make(objective=[{"loss": "nll", "weight": "importance"}], signal=["gold", "reference"])
    text = message(objective=[{"loss": "nll", "weight": "talr"}])
    assert "median_nll" in text and "signal 'behavior'" in text


def test_psft_with_one_update_a_step_is_refused():
    psft = [{"loss": {"kind": "clip", "advantage": 1.0}}]
    assert "batch.minibatches" in message(objective=psft, signal=["gold", "behavior"])
    assert make(("batch.minibatches=2",), objective=psft, signal=["gold", "behavior"])


def test_wrong_role_and_wrong_shape():
    with pytest.raises(RecipeError, match="expected a loss"):
        parse("loss", parse("weight", "probability", "w"), "objective.loss")
    with pytest.raises(RecipeError, match="expected a loss such as"):
        parse("loss", 3, "objective.loss")


def test_not_toml_names_the_file(tmp_path: Path):
    file = tmp_path / "broken.toml"
    file.write_text("seed = = 1\n")
    with pytest.raises(RecipeError, match=r"broken\.toml"):
        Recipe.load(file)
    with pytest.raises(RecipeError, match="neither a file nor a shipped recipe"):
        Recipe.load("no_such_recipe")


def test_a_kind_can_not_be_taken_twice():
    with pytest.raises(RecipeError, match="registered twice"):

        class Another(Loss, kind="nll"):
            def __call__(self, stats, batch):
                return stats.logprobs


def test_a_shipped_recipe_takes_a_plugin_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (
        "from statewise import Weight\n\n\nclass Half(Weight, kind='half_for_recipe_tests'):\n"
        "    needs = ('logprobs',)\n\n    def __call__(self, stats, batch):\n        return 0 * stats.logprobs + {}\n"
    )
    (tmp_path / "half.py").write_text(text.format(0.5))
    monkeypatch.chdir(tmp_path)
    changed = ["objective.0.weight=half_for_recipe_tests"]
    recipe = Recipe.load("tiny_sft", ['plugins=["half.py"]', *changed])
    (tmp_path / "half.py").write_text(text.format(0.25))
    assert recipe.hash != Recipe.load("tiny_sft", ["plugins=[]", *changed]).hash  # its text is part of the hash
    with pytest.raises(RecipeError, match="looked in .*recipes and "):
        Recipe.load("tiny_sft", ['plugins=["third.py"]'])


def test_plugins_that_fail_say_why(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"no file 'missing\.py'; looked in .* and "):
        load_plugin("missing.py", tmp_path)
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('inside')\n")
    with pytest.raises(RecipeError, match="RuntimeError: inside"):
        load_plugin("broken_plugin.py", tmp_path)
    with pytest.raises(RecipeError, match="neither a file ending in .py"):
        load_plugin("no_such_module_for_statewise")


def test_the_probe_goes_with_the_tasks() -> None:
    def names(*overrides: str) -> list[str]:
        recipe = Recipe.load("tiny_sft", overrides)
        assert Recipe.from_plain(recipe.to_plain()).hash == recipe.hash
        return [getattr(task, "name", None) or task.kind for task in recipe.eval.all_tasks()]

    assert names('eval.tasks=["tiny:facts"]') == ["tiny:facts", "probe"] and names("eval.tasks=[]") == ["probe"]
    assert names('eval.tasks=["tiny:text"]') == ["tiny:text"]
    assert names("eval.tasks=[]", "eval.probe=off") == []
    assert names("eval.tasks=[]", 'eval.probe={ kind = "text", data = "x.jsonl" }') == ["text"]

"""Runs with a teacher behind an endpoint, and with a store of what teachers said."""

import json
import signal as signals
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.server import Server, serving
from tests.training.conftest import losses_of, weights_of
from tests.training.test_distributed import run_on, same
from tests.training.test_loop import _killed, run_in_child
from tests.training.test_teachers import small, small_teacher

from statewise import train
from statewise.errors import EndpointError, RecipeError
from statewise.models.topk import TopK
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.signals.store import SignalStore
from statewise.teachers import TeacherModel

WHOLE = "objective.0.loss={kind='kl_student_teacher', top_k=320}"
FEW = "objective.0.loss={kind='kl_teacher_student', top_k=5}"


@pytest.fixture(scope="module")
def teacher(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_teacher(model_dir, tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def server(teacher: Path) -> Iterator[Server]:
    with serving(Server(teacher)) as started:
        yield started


@pytest.fixture(autouse=True)
def _well_behaved(server: Server) -> None:
    server.fault = lambda number, body: None


def at(url: str, retries: int = 4) -> str:
    return f"{{ endpoint = '{url}', retries = {retries}, timeout_seconds = 20 }}"


def pair(name: str, model_dir: Path, teacher: Path, server: Server, *changes: str) -> tuple[Recipe, Recipe]:
    """A shipped recipe with the teacher in this process, and with the same one behind the server."""
    from tests.training.test_teachers import WHERE

    remote = [f"{where}={at(server.url)}" for where in WHERE[name]]
    return small(name, model_dir, teacher, *changes), small(name, model_dir, teacher, *changes, *remote)


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if "loss" in row]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("opd_full", [WHOLE]),
        ("opd_topk", [FEW, "source.temperature=0.7", "batch.minibatches=2"]),
        ("opd_topk", [FEW, "batch.micro_rows=none", "batch.pack=256"]),
        ("opd_sampled", []),
        ("offline_kd", ["objective.0.loss={kind='jsd', top_k=8}"]),
    ],
)
def test_a_teacher_at_an_endpoint_is_the_teacher_here(
    name: str, changes: list[str], model_dir: Path, teacher: Path, server: Server, tmp_path: Path
):
    recipes = pair(name, model_dir, teacher, server, "budget.max_steps=2", *changes)
    here, there = (train(r, tmp_path / str(i), quiet=True) for i, r in enumerate(recipes))
    assert losses_of(there) == pytest.approx(losses_of(here), abs=1e-5)
    weights = [np.frombuffer(weights_of(run.path, 2)[-40_000:], np.float32) for run in (here, there)]
    assert np.abs(weights[0] - weights[1]).max() < 1e-3, "Adam magnifies rounding of gradients near 0"


@pytest.mark.parametrize("fault", ["shifted", "no bucket"])
def test_the_comparison_sees_a_fault(
    fault: str, model_dir: Path, teacher: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Teachers that speak of the next token's state, or whose rest is forgotten, have other losses."""
    from statewise.models.topk import TopKGrid, TopKRows

    def shifted(self: TopKGrid, at: tuple[Any, ...]) -> TopKRows:
        return TopKRows(self.ids_BTK[at].long(), self.values_BTK[at], self.num_tokens, self.temperature)

    def no_bucket(self: TopKRows, rows: slice, dtype: Any = None) -> Any:
        full = self.ids_NK.new_full((len(self.ids_NK[rows]), self.num_tokens), -30, dtype=self.values_NK.dtype)
        return full.scatter(-1, self.ids_NK[rows], self.values_NK[rows])

    if fault == "shifted":
        monkeypatch.setattr(TopKGrid, "take", shifted)
    else:
        monkeypatch.setattr(TopKRows, "logits", no_bucket)
    recipes = pair("opd_topk", model_dir, teacher, server, "budget.max_steps=1", FEW)
    here, there = (train(r, tmp_path / str(i), quiet=True) for i, r in enumerate(recipes))
    assert losses_of(there)[0] != pytest.approx(losses_of(here)[0], abs=1e-4)


@pytest.mark.parametrize("name", ["opd_continuation", "opd_off_policy"])
def test_its_text_is_learnt_from(name: str, model_dir: Path, teacher: Path, server: Server, tmp_path: Path):
    _, recipe = pair(name, model_dir, teacher, server, "budget.max_steps=3")
    rows = steps_of(train(recipe, tmp_path / "run", quiet=True))
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows)


def test_a_bad_server_gives_the_bytes_of_a_good_one(
    model_dir: Path, teacher: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("statewise.models.http.FIRST_DELAY", 0.01)
    _, recipe = pair("opd_topk", model_dir, teacher, server, FEW, "budget.max_steps=3")
    good = train(recipe, tmp_path / "good", quiet=True).path
    faults = ["429:0.01", "500", "drop", "truncate", "slow", "html"]
    tries: dict[str, int] = {}

    def fault(number: int, body: dict[str, Any]) -> str | None:
        """The first two tries of every other text fail, each in another way."""
        text = str(body["prompt"])
        tries[text] = tries.get(text, 0) + 1
        return faults[(len(tries) + tries[text]) % len(faults)] if tries[text] < 3 and len(tries) % 2 else None

    server.fault = fault
    bad = train(recipe, tmp_path / "bad", quiet=True).path
    assert weights_of(bad, 3) == weights_of(good, 3)


def test_a_dead_server_stops_the_run_which_goes_on_later(
    model_dir: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("statewise.models.http.FIRST_DELAY", 0.02)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    recipe = small("opd_topk", model_dir, teacher, FEW, f"signal.0.teacher={at(url, 2)}", "budget.max_steps=4")
    with serving(Server(teacher), port):
        whole = train(recipe, tmp_path / "whole", quiet=True).path
    dying = Server(teacher)
    with serving(dying, port):
        first: list[int] = []
        dying.fault = lambda number, body: "drop" if number >= 2 + 8 * 2 + 3 else first.append(number)  # in step 3
        with pytest.raises(EndpointError, match=r"gave no answer in 3 tries(.|\n)*step 3 with a checkpoint.*--resume"):
            train(recipe, tmp_path / "cut")
    shown = capsys.readouterr().err
    assert "paused, next try in" in shown
    run = RunDir.open(tmp_path / "cut")
    assert run.status == "failed" and "EndpointError" in run.info["error"] and list(run.checkpoints()) == [2]
    with pytest.raises(EndpointError, match="connection refused"):
        train(recipe, tmp_path / "cut", resume=True, quiet=True)
    with serving(Server(teacher), port):
        train(recipe, tmp_path / "cut", resume=True, quiet=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert weights_of(tmp_path / "cut", 4, file) == weights_of(whole, 4, file)
    assert losses_of(RunDir.open(tmp_path / "cut")) == losses_of(RunDir.open(whole))


def test_a_server_that_comes_back_is_waited_for(
    model_dir: Path, teacher: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("statewise.models.http.FIRST_DELAY", 0.1)
    recipe = small("opd_topk", model_dir, teacher, FEW, f"signal.0.teacher={at(server.url, 8)}", "budget.max_steps=2")
    whole = train(recipe, tmp_path / "whole", quiet=True).path
    begun, dead, refused = len(server.asked), threading.Event(), []

    def fault(number: int, body: dict[str, Any]) -> str | None:
        """Dead for half a second from the seventh request on."""
        if number == begun + 6:
            dead.set()
            threading.Timer(0.5, dead.clear).start()
        if dead.is_set():
            refused.append(number)
        return "drop" if dead.is_set() else None

    server.fault = fault
    assert weights_of(train(recipe, tmp_path / "run", quiet=True).path, 2) == weights_of(whole, 2) and refused


def test_two_processes_ask_for_their_shares(model_dir: Path, teacher: Path, server: Server, tmp_path: Path):
    _, recipe = pair("opd_topk", model_dir, teacher, server, FEW, "budget.max_steps=6")
    plain = recipe.to_plain()
    plain["optim"] = {"optimizer": "sgd", "lr": 0.1}
    same(run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two"))
    server.fault = lambda number, body: "no_logprobs" if body["prompt"] and number % 40 == 39 else None
    with pytest.raises(RuntimeError, match="EndpointError"):
        run_on(2, {**plain, "budget": {"max_steps": 20}}, tmp_path / "fails")


def test_the_key_comes_from_the_environment_and_stays_there(
    model_dir: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with serving(Server(teacher, key="sk-secret")) as server:
        where = "{ endpoint = '$TEACHER_URL', api_key_env = 'TEACHER_KEY', retries = 1 }"
        recipe = small("opd_topk", model_dir, teacher, FEW, f"signal.0.teacher={where}", "budget.max_steps=1")
        with pytest.raises(RecipeError, match="no variable 'TEACHER_URL'"):
            train(recipe, tmp_path / "none", quiet=True)
        monkeypatch.setenv("TEACHER_URL", server.url)
        monkeypatch.setenv("TEACHER_KEY", "sk-wrong")
        with pytest.raises(EndpointError, match=r"401.*\*\*\*"):
            train(recipe, tmp_path / "wrong", quiet=True)
        monkeypatch.setenv("TEACHER_KEY", "sk-secret")
        train(recipe, tmp_path / "run")
    shown = capsys.readouterr()
    assert "sk-" not in shown.out + shown.err
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"sk-" not in file.read_bytes(), file


# Recipes


def test_settings_of_an_endpoint():
    plain = TeacherModel.model_validate("https://host/v1")
    assert plain.endpoint == "https://host/v1" and plain.name == "https://host/v1" and not plain.is_past_policy
    assert TeacherModel.model_validate("runs/teacher").model_dump() == "runs/teacher"
    full = TeacherModel(endpoint="http://h/v1", model="big", retries=3)
    assert full.name == "big at http://h/v1"
    assert TeacherModel.model_validate(full.model_dump()) == full
    for settings, reason in (
        ({}, "expected one of them"),
        ({"path": "a", "endpoint": "http://h"}, "expected one of them"),
        ({"path": "a", "retries": 3}, "belongs to a teacher with an endpoint"),
        ({"endpoint": "http://h", "dtype": "bfloat16"}, "belongs to a teacher with a path"),
    ):
        with pytest.raises(RecipeError, match=reason):
            TeacherModel(**settings)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            ["objective.0.loss=kl_student_teacher"],
            r"'kl_student_teacher' reads the teacher's whole distribution.*set top_k",
        ),
        (["objective.0.loss={kind='kl_student_teacher', top_k=5, support='student'}"], "take support = 'teacher'"),
        (["objective.0.loss={kind='kl_student_teacher', top_k=5, temperature=2.0}"], "temperature = 1"),
        (["signal.0.temperature=0.5"], "signal.0..temperature = 0.5: a teacher at an endpoint"),
    ],
)
def test_what_an_endpoint_cannot_give_is_refused(model_dir: Path, teacher: Path, changes: list[str], reason: str):
    remote = "signal.0.teacher=http://host:8000/v1"
    small("opd_topk", model_dir, teacher, remote)
    with pytest.raises(RecipeError, match=reason):
        small("opd_topk", model_dir, teacher, remote, *changes)


# The store


def test_what_was_asked_once_is_read_from_then_on(model_dir: Path, teacher: Path, server: Server, tmp_path: Path):
    """The data come again every second step; a second run asks nothing but the probe."""
    changes = ["source.count=16", "budget.max_steps=4", f"signal.0.cache={tmp_path / 'cache'}", FEW]
    here, there = pair("offline_kd", model_dir, teacher, server, *changes)
    plain, _ = pair("offline_kd", model_dir, teacher, server, *changes[:2], FEW)
    expected = losses_of(train(plain, tmp_path / "plain", quiet=True))
    for name, recipe in (("here", here), ("there", there)):
        first = train(recipe, tmp_path / name, quiet=True)
        assert losses_of(first) == pytest.approx(expected, abs=1e-5)
        counts = [(row["teacher_cache_hits"], row["teacher_cache_misses"]) for row in steps_of(first)]
        assert counts == [(0, 8), (0, 8), (8, 0), (8, 0)]
        begun = len(server.asked)
        second = train(recipe, tmp_path / f"{name}_again", quiet=True)
        assert [row["teacher_cache_misses"] for row in steps_of(second)] == [0] * 4
        assert weights_of(second.path, 4) == weights_of(first.path, 4)
        assert len(server.asked) - begun == (2 if name == "there" else 0)


def test_a_changed_teacher_is_asked_again(model_dir: Path, teacher: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changed = tmp_path / "changed"
    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.get_input_embeddings().weight.data.mul_(1.3)
    model.save_pretrained(changed)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(changed)
    changes = ["source.count=16", "budget.max_steps=1", f"signal.0.cache={tmp_path / 'cache'}", FEW]
    misses = []
    for index, path in enumerate((teacher, changed, teacher)):
        run = train(small("offline_kd", model_dir, path, *changes), tmp_path / f"here{index}", quiet=True)
        misses.append(steps_of(run)[0]["teacher_cache_misses"])
    assert misses == [8, 8, 0]
    for index, path in enumerate((teacher, changed, teacher)):  # one name at the server, other weights
        with serving(Server(path)) as server:
            _, recipe = pair("offline_kd", model_dir, path, server, *changes)
            run = train(recipe, tmp_path / f"there{index}", quiet=True)
        misses.append(steps_of(run)[0]["teacher_cache_misses"])
    assert misses[3:] == [8, 8, 0]


def test_a_run_with_a_store_is_killed_and_resumed(model_dir: Path, teacher: Path, tmp_path: Path):
    recipes = [
        small(
            "offline_kd",
            model_dir,
            teacher,
            "source.count=16",
            "checkpoint.every=1",
            FEW,
            "budget.max_steps=4",
            f"signal.0.cache={tmp_path / name}",
        )
        for name in ("a", "b")
    ]
    whole, cut = train(recipes[0], tmp_path / "whole", quiet=True).path, tmp_path / "cut"
    assert run_in_child(_killed(recipes[1], cut, "statewise.training.loop.take_step", 3)) == -signals.SIGKILL
    train(recipes[1], cut, resume=True, quiet=True)
    assert weights_of(cut, 4) == weights_of(whole, 4)


def some(value: float, size: int = 3) -> TopK:
    return TopK(np.full(size, value, np.float32), np.ones((size, 2), np.int64), np.full((size, 2), value, np.float32))


def test_the_store_is_shared_and_survives_damage(tmp_path: Path):
    one, two = SignalStore(tmp_path, {"weights": "x"}), SignalStore(tmp_path, {"weights": "x"})
    asked: list[list[int]] = []

    def ask(missing: list[Any]) -> list[TopK]:
        asked.extend(missing)
        return [some(-float(ids[0])) for ids in missing]

    found, hits = one.topk([[1, 2, 3], [2, 3, 4], [1, 2, 3]], "top 2", ask)
    assert hits == [False, False, False] and asked == [[1, 2, 3], [2, 3, 4]], "equal texts are asked for once"
    assert [f.logprobs[0] for f in found] == [-1, -2, -1]
    found, hits = two.topk([[2, 3, 4], [5, 6, 7]], "top 2", ask)
    assert hits == [True, False] and [f.logprobs[0] for f in found] == [-2, -5]
    assert one.topk([[5, 6, 7]], "top 2", ask)[1] == [True], "written by another process meanwhile"
    assert one.topk([[5, 6, 7]], "top 3", ask)[1] == [False], "other settings"
    assert SignalStore(tmp_path, {"weights": "y"}).topk([[5, 6, 7]], "top 2", ask)[1] == [False]
    for file in one.path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="asked for again"):
        found, hits = SignalStore(tmp_path, {"weights": "x"}).topk([[2, 3, 4]], "top 2", ask)
    assert hits == [False] and found[0].logprobs[0] == -2
    assert json.loads((one.path / "teacher.json").read_text())["about"] == {"weights": "x"}


def test_processes_may_write_at_once(tmp_path: Path):
    def work(offset: int) -> None:
        store = SignalStore(tmp_path, {"weights": "x"})
        for start in range(20):
            store.topk([[start, offset % 2]], "top 2", lambda missing: [some(-float(ids[0])) for ids in missing])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [[start, parity] for start in range(20) for parity in (0, 1)]
    found, hits = SignalStore(tmp_path, {"weights": "x"}).topk(texts, "top 2", lambda missing: [])
    assert all(hits) and [f.logprobs[0] for f in found] == [-float(t[0]) for t in texts]
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_store_of_an_average_is_refused(model_dir: Path):
    ema = "signal.1={kind='teacher', teacher={path='ema', decay=0.9}, cache='cache'}"
    with pytest.raises(RecipeError, match="'ema' has other weights after every update"):
        small("self_teacher", model_dir, Path("x"), ema)


def test_a_cache_that_is_a_file(model_dir: Path, teacher: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("")
    from statewise.errors import DataError

    with pytest.raises(DataError, match=r"signal.cache = '.*cache': can't be used as a folder"):
        SignalStore(tmp_path / "cache", {})

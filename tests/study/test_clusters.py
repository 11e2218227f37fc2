"""Studies on a Ray cluster of two nodes, one of which is lost, and through submitit; skipped without those packages."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from statewise.errors import MissingExtra, RecipeError
from statewise.run import RunDir
from statewise.study.plan import make_plan
from statewise.study.run import left_to_do, run_study

SECONDS = 240.0


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < until, "took too long"
        time.sleep(0.05)


def test_an_unknown_place_is_refused(runnable: Path) -> None:
    with pytest.raises(RecipeError, match="local, ray, slurm"):
        run_study(make_plan(runnable), on="moon")


@pytest.mark.parametrize(("on", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_named(runnable: Path, monkeypatch: pytest.MonkeyPatch, on: str, package: str) -> None:
    import sys

    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=f"pip install 'statewise\\[{on}\\]'"):
        run_study(make_plan(runnable), on=on)


@pytest.mark.slow
def test_a_lost_worker_and_a_lost_node_are_survived(runnable: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'statewise[ray]'")
    from ray.cluster_utils import Cluster

    runnable.write_text(runnable.read_text().replace("max_steps = 3", "max_steps = 100"))
    plan = make_plan(runnable)
    first = plan.path(plan.by_arm["stress", 0].key)
    memory = 80 * 2**20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": memory})
    failed: list[dict[str, str]] = []
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=memory)
        ray.init(address=cluster.address, log_to_driver=False)
        study = threading.Thread(target=lambda: failed.append(run_study(plan, on="ray")), daemon=True)
        study.start()
        wait_for(lambda: list(first.glob("checkpoints/step_*")))
        os.kill(int((first / "lock").read_text().split()[1]), signal.SIGKILL)
        wait_for(lambda: RunDir(first).is_locked())
        cluster.add_node(num_cpus=1, object_store_memory=memory)
        cluster.remove_node(node, allow_graceful=False)
        study.join(SECONDS)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert failed == [{}]
    assert left_to_do(plan) == {}
    steps = [row["step"] for row in RunDir(first).metrics() if "step_seconds" in row]
    assert steps == list(range(1, 101))


@pytest.mark.slow
def test_submitit_does_the_pieces(runnable: Path) -> None:
    pytest.importorskip("submitit", reason="needs submitit: pip install 'statewise[slurm]'")
    from statewise.study.clusters import SlurmWorkers

    plan = make_plan(runnable)
    (plan.out / "logs").mkdir(parents=True)
    assert run_study(plan, jobs=1, work=SlurmWorkers(plan, "local")) == {}
    assert left_to_do(plan) == {}

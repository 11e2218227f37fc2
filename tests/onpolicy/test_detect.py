"""Comparing data sets: own samples, sharper ones, another model's, and what can't be told."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from statewise.errors import RecipeError, RunError
from statewise.models.generate import InProcessSampler
from statewise.models.head import FullLogits
from statewise.models.load import load_policy
from statewise.onpolicy.detect import detect
from statewise.onpolicy.drift import pair_statistics
from statewise.onpolicy.scoring import score
from statewise.onpolicy.verdict import own_words
from statewise.stats.martingale import OwnTest
from statewise.tiny import tasks
from statewise.types import Sampling

NUM_SAMPLES = 60


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A file of samples of the embedded model, with their ids, at a temperature."""
    directory = tmp_path_factory.mktemp("samples")

    def make(temperature: float = 1.0, model: str = "tiny", seed: int = 0) -> Path:
        file = directory / f"{temperature}-{Path(model).name}-{seed}.jsonl"
        if not file.exists():
            policy = load_policy(model)
            rows = tasks.math_problems("train", NUM_SAMPLES)
            chats = [
                policy.tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False)
                for r in rows
            ]
            sampler = InProcessSampler(policy.model, pad_id=policy.pad_id)
            law = Sampling(max_tokens=64, temperature=temperature, stop_ids=policy.stop_ids, seed=seed)
            lines = [
                json.dumps({"input_ids": [*p, *c.tokens], "completion_mask": [0] * len(p) + [1] * len(c.tokens)})
                for p, c in zip(chats, sampler.generate(chats, law), strict=True)
            ]
            file.write_text("\n".join(lines) + "\n")
        return file

    return make


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model with noise on its layers."""
    path = tmp_path_factory.mktemp("model") / "perturbed"
    policy = load_policy("tiny")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.model.layers.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4 * parameter.std())
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def found(samples: Callable[..., Path], perturbed: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Own samples against those of the perturbed model, which is known."""
    out = tmp_path_factory.mktemp("detected")
    made = detect(str(samples()), str(samples(model=perturbed)), "tiny", out=out, other_model=perturbed)
    assert json.loads((out / "detect.json").read_text())["verdict"] == made["verdict"]
    assert "Drift" in (out / "report.html").read_text()
    return made


def test_own_samples(found: dict[str, Any]) -> None:
    assert found["verdict"][0].startswith("Nothing speaks against these being the model's own samples at temperature 1")
    test = found["a"]["test"]
    assert test["p"] > 0.01 and abs(found["a"]["mean_phi"]) < 2 * test["detectable"]


def test_another_model_and_its_drift(found: dict[str, Any]) -> None:
    """Mean phi seen is that which follows from both laws, and not -KL alone; the text is the other model's own."""
    drift = found["drift"]
    assert found["b"]["test"]["p"] < 0.01
    assert drift["expected_phi"]["mean"] == pytest.approx(-drift["kl"]["mean"] - drift["entropy_gap"]["mean"])
    assert drift["mean_phi"]["mean"] == pytest.approx(found["b"]["mean_phi"], abs=1e-5)
    width = drift["mean_phi"]["high"] - drift["mean_phi"]["low"]
    assert abs(drift["mean_phi"]["mean"] - drift["expected_phi"]["mean"]) < width
    assert drift["own_of_other"]["p"] > 0.01 and "Nothing speaks against B" in found["verdict"][3]
    assert abs(drift["entropy_gap"]["mean"]) > 0.01  # so that -KL alone would be off


def test_statistics_side_by_side(found: dict[str, Any]) -> None:
    rows = {(r["level"], r["statistic"]): r for r in found["statistics"]}
    assert len(rows) == 5 + 6
    for row in rows.values():
        assert 0 <= row["auc"]["low"] <= row["auc"]["value"] <= row["auc"]["high"] <= 1
    assert rows["sequence", "cll"]["auc"]["low"] > 0.5
    # Monotone in each other at the level of tokens, up to their direction.
    token = rows["token", "perplexity"]["auc"], rows["token", "log_likelihood"]["auc"]
    assert token[0]["value"] == pytest.approx(token[1]["value"])
    assert rows["token", "cll"]["auc_less_cll"] is None


def test_sharper_text_drifts_upwards(samples: Callable[..., Path], tmp_path: Path) -> None:
    """Low temperature: phi is positive on average, which an unconditional claim of negative drift denies."""
    made = detect(str(samples()), str(samples(0.3)), "tiny", out=tmp_path / "out")
    assert made["b"]["mean_phi_low"] > 0 and "sharper than the model's own samples" in made["verdict"][1]
    assert made["difference"]["mean_phi"] > 0 and made["difference"]["p"] < 0.01
    # At the temperature it was sampled at, it is the model's own.
    own = score(str(samples(0.3)), "tiny", out=tmp_path / "own", temperature=0.3)
    assert own.summary["own_samples"]["p"] > 0.01 or math.isnan(own.summary["own_samples"]["p"] or math.nan)


def test_a_uniform_model_can_tell_nothing(samples: Callable[..., Path], tmp_path: Path) -> None:
    policy = load_policy("tiny")
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.zero_()
    policy.model.save_pretrained(tmp_path / "flat")
    policy.tokenizer.save_pretrained(tmp_path / "flat")
    made = detect(str(samples()), str(samples(0.3)), str(tmp_path / "flat"), out=tmp_path / "out")
    for letter, verdict in zip("ab", made["verdict"], strict=False):
        assert made[letter]["mean_phi"] == pytest.approx(0, abs=1e-5)
        assert "finds its choices about equally likely" in verdict


def test_finished_scores_are_taken(samples: Callable[..., Path], tmp_path: Path) -> None:
    first = score(str(samples()), "tiny", out=tmp_path / "first")
    hot = score(str(samples()), "tiny", out=tmp_path / "hot", temperature=2.0)
    made = detect(str(first.path), str(samples(0.3)), "tiny", out=tmp_path / "out", limit=20)
    assert made["a"]["samples"] == 20 and not (tmp_path / "out" / "a").exists()
    with pytest.raises(RunError, match=r"were not scored alike; they differ in temperature \(1.0 before, 2.0 now\)"):
        detect(str(first.path), str(hot.path), out=tmp_path / "bad")
    with pytest.raises(RunError, match="no model is named"):
        detect(str(samples()), str(first.path), out=tmp_path / "bad")


def test_pair_statistics_oracle() -> None:
    """Reference values: q = [.2, .5, .3] against z = [2, .5, -1]."""
    p, q = torch.tensor([[2.0, 0.5, -1.0]] * 3), torch.tensor([[0.2, 0.5, 0.3]] * 3).log()
    out = pair_statistics(FullLogits(p), FullLogits(q), torch.arange(3))
    assert out["kl"] == pytest.approx([0.8616582826] * 3, abs=1e-6)
    assert out["entropy_q"] == pytest.approx([1.0296530141] * 3, abs=1e-6)
    assert out["entropy_p"] == pytest.approx([0.6215846047] * 3, abs=1e-6)
    assert out["phi"] == pytest.approx([0.3802733080, -1.1197266920, -2.6197266920], abs=1e-6)
    drift = out["entropy_p"] - out["entropy_q"] - out["kl"]
    assert drift[0] == pytest.approx(-1.2697266920, abs=1e-6)
    assert np.array([0.2, 0.5, 0.3]) @ out["phi"] == pytest.approx(drift[0], abs=1e-6)
    assert abs(drift[0] + out["kl"][0]) > 0.4  # -KL alone is another number


def test_another_vocabulary_is_refused(samples: Callable[..., Path], model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="has another vocabulary"):
        detect(str(samples()), str(samples(0.3)), "tiny", out=tmp_path / "out", other_model=str(model_dir))


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    """A model with a vocabulary of its own."""
    from random import Random

    from statewise.tiny import mixture
    from statewise.tiny.tokenizer import train_tokenizer

    random = Random(1)
    tokenizer = train_tokenizer((mixture.draw_document(random, {"text": 1.0}) for _ in range(50)), 300, 256)
    policy = load_policy("tiny")
    policy.model.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    yield tmp_path / "own"


@pytest.mark.parametrize(("low", "says"), [(0.012, True), (-0.001, False)])
def test_an_interval_without_0_that_is_no_proof_is_explained(low: float, says: bool) -> None:
    """Sure tokens hardly vary among themselves, and own samples would now and then draw an unlikely one."""
    test = OwnTest(z=1.9, p_mean=0.06, variance_ratio=0.1, p_variance=0.2, p=0.12, detectable=0.02)
    said = own_words(test, 0.014, low, 0.016, 0.02, 1.0)
    assert said.startswith("Nothing speaks against") and ("would itself vary by 0.014 around 0" in said) == says

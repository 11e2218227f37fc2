"""phi of tokens against closed forms, and what a sequence adds up to."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.errors import StatewiseError
from statewise.models.head import FullLogits
from statewise.models.load import load_policy
from statewise.models.score import InProcessScorer, score_rows
from statewise.onpolicy.cll import STATISTICS, TokenStatistics, score_sequences, score_tokens, summarise

Z = torch.tensor([2.0, 0.5, -1.0])
PHI = [0.3802733080, -1.1197266920, -2.6197266920]
VARENTROPY = 0.6018087530


class FixedScorer:
    """Every state has the logits z."""

    def __init__(self, z: torch.Tensor):
        self.z = z

    def score_at(
        self, sequences: Any, masks: Any, needs: Any = (), *, temperature: float = 1.0, report: Any = None
    ) -> Any:
        out = []
        for sequence, mask in zip(sequences, masks, strict=True):
            targets = torch.tensor([t for t, m in zip(sequence, mask, strict=True) if m], dtype=torch.long)
            rows = FullLogits(self.z.repeat(len(targets), 1))
            out.append({k: v.numpy() for k, v in score_rows(rows, targets, needs, temperature=temperature).items()})
        return out


def scored(tokens: list[int], z: torch.Tensor = Z, **kwargs: float) -> TokenStatistics:
    return score_tokens(FixedScorer(z), [0, *tokens], [False] + [True] * len(tokens), **kwargs)


def test_oracle() -> None:
    found = scored([0, 1, 2])
    assert found.phi == pytest.approx(PHI, abs=1e-6)
    assert found.varentropy == pytest.approx([VARENTROPY] * 3, abs=1e-6)
    fourth = float(Z.softmax(0).numpy() @ np.array(PHI) ** 4)
    assert found.fourth == pytest.approx([fourth] * 3, rel=1e-5)
    assert found.rank.tolist() == [0, 1, 2] and found.positions.tolist() == [1, 2, 3]
    p = Z.softmax(0).numpy()
    assert p @ found.phi == pytest.approx(0, abs=1e-6)
    assert p @ found.phi**2 == pytest.approx(VARENTROPY, abs=1e-6)
    assert abs(p @ (found.logprobs - found.entropy)) > 1  # the other sign of H is not centred


def test_shift_and_temperature() -> None:
    assert scored([0, 1, 2], Z + 7).phi == pytest.approx(PHI, abs=1e-5)
    assert scored([0, 1, 2], Z * 2, temperature=2.0).phi == pytest.approx(PHI, abs=1e-6)
    assert scored([0, 1, 2], torch.zeros(3)).phi == pytest.approx([0, 0, 0], abs=1e-6)  # uniform p


def test_record() -> None:
    record = summarise(scored([0, 1, 2]))
    assert record["num_tokens"] == 3
    assert record["sum_phi"] == pytest.approx(sum(PHI), abs=1e-5)
    assert record["mean_phi"] == pytest.approx(sum(PHI) / 3, abs=1e-5)
    assert record["min_phi"] == pytest.approx(PHI[2], abs=1e-5)
    shares = [record[f"share_above_{n}"] for n in ("0", "minus_1", "minus_3", "minus_5")]
    assert shares == pytest.approx([1 / 3, 1 / 3, 1, 1])
    assert record["z"] == pytest.approx(sum(PHI) / math.sqrt(3 * VARENTROPY), abs=1e-5)
    assert record["perplexity"] == pytest.approx(math.exp(1.7413112967), rel=1e-5)
    assert record["mean_log_rank"] == pytest.approx((math.log(2) + math.log(3)) / 3)
    assert math.isnan(summarise(scored([0], torch.zeros(3)))["z"])  # no varentropy


def test_a_broken_model_is_named() -> None:
    with pytest.raises(StatewiseError, match="sequence 0: log p, H or its moments are not finite"):
        scored([0], torch.full((3,), math.nan))


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 320, n).tolist() for n in (9, 3, 17, 1, 6)]


def test_masked_rows_are_the_rows_of_the_whole(model_dir: Path, sequences: list[list[int]]) -> None:  # noqa: F811
    model = load_policy(str(model_dir)).model
    scorer = InProcessScorer(model, pad_id=0, batch_tokens=40)
    whole = scorer.score(sequences, STATISTICS)
    masks = [[i % 3 == 1 for i in range(len(s))] for s in sequences]
    for mask, every, some in zip(masks, whole, score_sequences(scorer, sequences, masks), strict=True):
        assert some.positions.tolist() == [i for i, m in enumerate(mask) if m]
        for name in STATISTICS:
            expected = [v for v, m in zip(every[name], mask, strict=True) if m]
            assert getattr(some, name) == pytest.approx(expected, rel=1e-4, abs=2e-5)
    logits = model(input_ids=torch.tensor([sequences[2]])).logits[0].double().log_softmax(-1)
    log_p = logits[4, sequences[2][5]]
    assert whole[2]["logprobs"][5] == pytest.approx(log_p.item(), abs=1e-5)
    assert whole[2]["rank"][5] == int((logits[4] > log_p).sum())
    with pytest.raises(ValueError, match="false for the first"):
        scorer.score_at([[1, 2]], [[True, True]])


def test_float32_statistics_of_a_bf16_model(model_dir: Path, sequences: list[list[int]]) -> None:  # noqa: F811
    model = load_policy(str(model_dir)).model.bfloat16()
    masks = [[i > 0 for i in range(len(s))] for s in sequences]

    def phi(**kwargs: Any) -> np.ndarray:
        scorer = InProcessScorer(model, pad_id=0, **kwargs)
        return np.concatenate([s.phi for s in score_sequences(scorer, sequences, masks)])

    plain, exact = phi(dtype=torch.float32), phi(dtype=torch.float32, frozen=True)
    assert exact == pytest.approx(plain, abs=1e-5)
    assert np.abs(phi() - plain).max() > 1e-4  # logits rounded to bf16
    assert torch.get_float32_matmul_precision() == "highest"

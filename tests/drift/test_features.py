import math

import numpy as np
import pytest
import torch

from statewise.drift.features import BUCKETS, STYLE, hidden, lexical, scaled, scaled_lexical, words


def test_words() -> None:
    assert words("It's 3+4 = 7, né_x") == ["it", "'", "s", "3", "+", "4", "=", "7", ",", "né", "_", "x"]


def test_lexical_by_hand() -> None:
    text = "Two 2 two\n= 2"
    row = dict(zip(STYLE, lexical([text])[0], strict=False))
    assert row["log_characters"] == pytest.approx(math.log(14)) and row["log_words"] == pytest.approx(math.log(6))
    assert row["log_lines"] == pytest.approx(math.log(2)) and row["log_numbers"] == pytest.approx(math.log(3))
    assert row["mean_word_length"] == pytest.approx(9 / 5) and row["distinct_words"] == pytest.approx(3 / 5)
    assert row["distinct_pairs"] == 1.0  # two 2, 2 two, two =, = 2
    assert row["digit_share"] == pytest.approx(2 / 13) and row["upper_share"] == pytest.approx(1 / 13)
    assert row["space_share"] == pytest.approx(4 / 13) and row["operator_share"] == pytest.approx(1 / 13)
    assert row["punctuation_share"] == 0.0
    shares = lexical([text])[0, len(STYLE) :]
    assert shares.sum() == pytest.approx(1) and sorted(shares)[-3:] == pytest.approx([0.2, 0.4, 0.4])
    assert (lexical([""]) == 0).all() and lexical([]).shape == (0, len(STYLE) + BUCKETS)


def test_scaling() -> None:
    raw = np.array([[1.0, 5.0, 0.0], [3.0, 5.0, 1.0]])
    assert scaled(raw).tolist() == [[-1.0, 0.0, -1.0], [1.0, 0.0, 1.0]]
    assert scaled(raw, (2, 1))[1] == pytest.approx([1 / math.sqrt(2), 0.0, 1.0])
    out = scaled_lexical(["a b", "a cat sat", "7 + 8"])
    assert np.allclose(out.mean(0), 0) and out.shape == (3, 76)


def test_hidden_states_are_the_models(model, tokenizer) -> None:
    """In any batch, at any length of the state."""
    sequences = [tokenizer.encode(t) for t in ("One day a cat", "Tom has 3 apples and buys 4 more.", "x")]
    at = [[2, len(sequences[0])], [1], [1]]
    found = hidden(model, sequences, at, pad_id=0, batch_tokens=12)
    rows = []
    for sequence, lengths in zip(sequences, at, strict=True):
        for length in lengths:
            with torch.no_grad():
                rows.append(model.model(input_ids=torch.tensor([sequence[:length]])).last_hidden_state[0, -1].numpy())
    assert np.allclose(found, np.stack(rows), atol=1e-4)

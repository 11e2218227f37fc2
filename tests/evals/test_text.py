"""Held-out text: nats a token over the corpus, windows, bits a byte."""

import math

import pytest
import torch

from statewise.component import parse
from statewise.errors import DataError
from statewise.evals.results import summarise
from statewise.models.score import InProcessScorer
from statewise.stats import mean_interval


def task(**settings):
    return parse("task", {"kind": "text", **settings}, "tasks[0]")


TEXTS = ["Tom went to the river. It was raining.", "Eva saw a small dog.", "It was warm. " * 12]


def nats(model, ids):
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return -logp.gather(-1, torch.tensor(ids[1:])[:, None]).sum().item()


def test_is_the_cross_entropy_of_the_corpus(write, model, tokenizer, context):
    data = write("t.jsonl", [{"text": t} for t in TEXTS])
    records = task(data=data).run(context(scorer=InProcessScorer(model, pad_id=0, batch_tokens=64)))
    result = summarise(task(data=data), records)
    ids = [tokenizer.encode(t) for t in TEXTS]
    totals, counts = [nats(model, x) for x in ids], [len(x) - 1 for x in ids]
    assert [r["nats"] for r in records] == pytest.approx(totals, rel=1e-5)
    assert [r["score"] for r in records] == pytest.approx([t / c for t, c in zip(totals, counts, strict=True)])
    assert result.mean == pytest.approx(sum(totals) / sum(counts)) and not result.higher_is_better
    assert result.metric == "nats_per_token"
    assert (result.low, result.high) == pytest.approx(mean_interval([r["score"] for r in records], weights=counts))
    num_bytes = sum(len(t.encode()) - len(tokenizer.decode(x[:1]).encode()) for t, x in zip(TEXTS, ids, strict=True))
    assert result.extra["bits_per_byte"] == pytest.approx(sum(totals) / math.log(2) / num_bytes)
    assert result.extra["perplexity"] == pytest.approx(math.exp(result.mean))


def test_windows_predict_every_token_once(write, model, tokenizer, context):
    ids = tokenizer.encode(TEXTS[2])
    data = write("t.jsonl", [{"text": TEXTS[2]}])
    for window in (2, 7, len(ids) - 1, len(ids), len(ids) + 1):
        record = task(data=data, window=window).run(context(scorer=InProcessScorer(model, pad_id=0)))[0]
        assert record["weight"] == len(ids) - 1
        pieces = [ids[at : at + window] for at in range(0, len(ids) - 1, window - 1)]
        assert record["nats"] == pytest.approx(sum(nats(model, piece) for piece in pieces), rel=1e-4)


def test_a_text_longer_than_the_model_is_read_in_windows(write, model, context):
    data = write("t.jsonl", [{"text": "It was warm. " * 300}])
    record = task(data=data).run(context(scorer=InProcessScorer(model, pad_id=0)))[0]
    assert record["weight"] > 512 and math.isfinite(record["score"])


def test_tiny_text(model, context):
    scorer = InProcessScorer(model, pad_id=0)
    records = parse("task", {"kind": "tiny:text", "count": 5}, "t").run(context(scorer=scorer))
    assert len(records) == 5 and all(r["score"] > 0 for r in records)


def test_refuses_what_it_cant_predict(write, context, model):
    with pytest.raises(DataError, match=r"t\.jsonl:1: no 'text'"):
        task(data=write("t.jsonl", [{"txt": "x"}])).run(context())
    scorer = InProcessScorer(model, pad_id=0)
    with pytest.raises(DataError, match="text '0' has 1 tokens, expected at least 2"):
        task(data=write("t.jsonl", [{"text": "x"}])).run(context(scorer=scorer))

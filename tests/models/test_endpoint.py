"""Teachers behind an endpoint: what is asked, what is believed, what is done when the server misbehaves."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.server import Server, serving
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.errors import EndpointError, RecipeError
from statewise.losses.divergence import coarsen
from statewise.models.endpoint import EndpointSampler, EndpointScorer
from statewise.models.generate import InProcessSampler
from statewise.models.http import Client, Refused, _retry_after
from statewise.models.load import load_policy
from statewise.models.probe import Probed, Wanted, probe
from statewise.models.score import InProcessScorer
from statewise.models.topk import TopKGrid, TopKRows
from statewise.types import Sampling

Start = Callable[..., Server]
V = 320
TEXTS = [[5, 6, 7, 8, 9, 10], [100, 3, 44], [7] * 20, [300, 301]]


@pytest.fixture
def start(model_dir: Path) -> Iterator[Start]:  # noqa: F811
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serving(Server(settings.pop("path", model_dir), **settings)))


def client(server: Server, **settings: Any) -> Client:
    quick = {"retries": 3, "timeout_seconds": 5.0, "say": lambda text: None} | settings
    return Client(server.url, **quick)


def opened(server: Server, *, k: int = 0, generates: bool = False, tokenizer: Any = None, **settings: Any) -> Probed:
    wanted = Wanted(True, k, generates)
    return probe(client(server, **settings), None, tokenizer or server.policy.tokenizer, V, wanted)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statewise.models.http.FIRST_DELAY", 0.01)


# What a healthy server gives


@pytest.mark.parametrize(
    ("dialect", "field", "max_tokens"),
    [("vllm", "prompt_logprobs", 1), ("vllm_old", "prompt_logprobs", 1), ("echo", "echo", 0)],
)
def test_scores_equal_those_in_this_process(start: Start, dialect: str, field: str, max_tokens: int):
    server = start(dialect=dialect)
    endpoint = opened(server, k=7).endpoint
    assert endpoint.asking is not None and (endpoint.asking.field, endpoint.asking.max_tokens) == (field, max_tokens)
    for k in (0, 7):
        for found, expected in zip(EndpointScorer(endpoint).topk(TEXTS, k), server.scorer.topk(TEXTS, k), strict=True):
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert np.array_equal(found.ids, expected.ids)
            assert found.values[1:] == pytest.approx(expected.values[1:], abs=1e-5)
    assert EndpointScorer(endpoint).score([[5, 6]])[0]["logprobs"][0] == 0.0


def test_a_server_that_names_texts_gives_the_tokens_own_log_probabilities(start: Start):
    server = start(dialect="text")
    endpoint = opened(server).endpoint
    assert endpoint.asking is not None and not endpoint.asking.named and endpoint.asking.max_tokens == 1
    (found,), (expected,) = EndpointScorer(endpoint).topk(TEXTS[:1], 0), server.scorer.topk(TEXTS[:1], 0)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    with pytest.raises(EndpointError, match="not of 4 tokens a place|no prompt log-probabilities"):
        opened(server, k=4)


def test_samples_are_those_of_the_server(start: Start):
    for dialect in ("vllm", "vllm_old"):
        server = start(dialect=dialect)
        sampler = EndpointSampler(opened(server, generates=True).endpoint, processed=False, needs_law=True)
        found = sampler.generate(TEXTS, Sampling(6, seed=3), rows=[4, 5, 6, 7])
        again = sampler.generate(TEXTS[2:], Sampling(6, seed=3), rows=[6, 7])
        assert again == found[2:], "a row's stream does not depend on its neighbours"
        for prompt, completion in zip(TEXTS, found, strict=True):
            scored = server.scorer.score([[*prompt, *completion.tokens]])[0]["logprobs"][len(prompt) :]
            assert completion.logprobs == pytest.approx(scored, abs=1e-5)
        body = server.asked[-1]
        assert (
            body["top_k"] == -1 and body["top_p"] == 1.0 and body["repetition_penalty"] == 1.0 and body["min_p"] == 0.0
        )


def test_a_completion_ends_with_the_context(start: Start):
    server = start()
    sampler = EndpointSampler(opened(server).endpoint, processed=False, needs_law=True)
    full, room = sampler.generate([[7] * 256, [7] * 254], Sampling(50, stop_ids=(1,)))
    assert full.tokens == () and full.stop_reason == "length" and len(room.tokens) <= 2


@pytest.mark.parametrize("processed", [True, False])
def test_whether_log_probabilities_follow_the_temperature_is_found_out(start: Start, processed: bool):
    server = start(processed=processed)
    probed = opened(server, generates=True)
    assert probed.processed is processed
    law = Sampling(4, temperature=0.5, seed=1)
    sampler = EndpointSampler(probed.endpoint, processed=probed.processed, needs_law=True)
    if not processed:
        with pytest.raises(EndpointError, match="--logprobs-mode processed_logprobs"):
            sampler.generate(TEXTS, law)
        lenient = EndpointSampler(probed.endpoint, processed=False, needs_law=False).generate(TEXTS, law)
        assert all(math.isnan(v) for c in lenient for v in c.logprobs)
        return
    for prompt, completion in zip(TEXTS, sampler.generate(TEXTS, law), strict=True):
        scorer = InProcessScorer(server.policy.model, pad_id=0)
        scored = scorer.score([[*prompt, *completion.tokens]], temperature=0.5)[0]["logprobs"][len(prompt) :]
        assert completion.logprobs == pytest.approx(scored, abs=1e-5)


def test_requests_are_made_at_once_and_answers_keep_their_order(start: Start):
    server = start(fault=lambda number, body: "slow" if number % 3 == 0 else None)
    endpoint = opened(server, concurrency=6).endpoint
    texts = [[i, i + 1, i + 2] for i in range(30)]
    found = EndpointScorer(endpoint).topk(texts, 0)
    expected = server.scorer.topk(texts, 0)
    assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-5) for a, b in zip(found, expected, strict=True))
    assert 1 < server.most_at_once <= 6


# The probe


def test_the_model_is_named_by_the_server_or_must_be(start: Start):
    assert opened(start(models=("only",))).endpoint.model == "only"
    two = start(models=("base", "lora"))
    with pytest.raises(EndpointError, match="serves base, lora; name one in the teacher's `model`"):
        opened(two)
    with pytest.raises(EndpointError, match=r"no model 'bace'; did you mean 'base'\?"):
        probe(client(two), "bace", two.policy.tokenizer, V, Wanted())


def test_a_wrong_address_says_so(start: Start):
    server = start()
    server.url = server.url.removesuffix("/v1")
    with pytest.raises(EndpointError, match="The address ends in /v1"):
        opened(server)
    for url in ("host:8000/v1", "ftp://host/v1", "http:///v1"):
        with pytest.raises(RecipeError, match="expected an address such as http://host:8000/v1"):
            Client(url)
    with pytest.raises(RecipeError, match="holds a user or password"):
        Client("http://user:secret@host/v1")


def test_the_key_is_sent_and_never_shown(start: Start):
    server = start(key="sk-secret")
    assert opened(server, key="sk-secret").endpoint.model == "teacher"
    for key in (None, "sk-wrong"):
        with pytest.raises(EndpointError, match="api_key_env") as caught:
            opened(server, key=key)
        assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("dialect", ["vllm", "vllm_old", "text"])
def test_another_tokenizer_is_refused_with_the_reason(start: Start, dialect: str):
    from statewise.tiny.tokenizer import train_tokenizer

    other = train_tokenizer(["Natalia sold clips in May, other words make other tokens"] * 30, 300, 256)
    with pytest.raises(EndpointError, match="another tokenizer than the policy"):
        opened(start(dialect=dialect), tokenizer=other)


def test_too_few_tokens_a_place_name_the_limit(start: Start):
    server = start(max_logprobs=5)
    assert opened(server, k=5).endpoint.asking is not None
    with pytest.raises(EndpointError, match=r"not of 6 tokens a place.*greater than max.*--max-logprobs 6"):
        opened(server, k=6)
    with pytest.raises(EndpointError, match=r"not of 320 tokens a place.*--max-logprobs -1"):
        opened(server, k=V)


def test_a_server_without_prompt_log_probabilities_is_refused(start: Start):
    server = start(fault=lambda number, body: "no_logprobs")
    with pytest.raises(EndpointError, match="gives no prompt log-probabilities.*Take a vLLM server"):
        opened(server)


# A server that misbehaves


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("fault", ["429", "429:0.02", "500", "503", "drop", "truncate", "html"])
def test_passing_trouble_passes(start: Start, fault: str):
    server = start()
    endpoint = opened(server).endpoint
    first, seen = len(server.asked), []
    server.fault = lambda number, body: fault if number < first + 2 else None
    endpoint.client.say = seen.append
    (found,) = EndpointScorer(endpoint).topk([TEXTS[0]], 0)
    assert found.logprobs == pytest.approx(server.scorer.topk([TEXTS[0]], 0)[0].logprobs, abs=1e-5)
    assert len(server.asked) == first + 3
    assert "paused, next try in" in seen[0] and "answers again" in seen[-1] and len(seen) == 2


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", "HTTP 500: not now"),
        ("drop", "remote end closed|reset"),
        ("hang", r"did not answer within 0\.2 s"),
        ("trickle", r"did not answer within 0\.2 s"),
        ("truncate", "broke in the middle|IncompleteRead"),
        ("html", "not JSON: '<html>a proxy"),
    ],
)
def test_lasting_trouble_ends_by_name(start: Start, fault: str, reason: str):
    server = start()
    endpoint = opened(server, retries=1).endpoint
    endpoint.client.timeout_seconds = 0.2 if fault in ("hang", "trickle") else 20.0
    server.fault = lambda number, body: fault
    began = time.monotonic()
    with pytest.raises(EndpointError, match=rf"endpoint {server.url}: gave no answer in 2 tries.*({reason})"):
        EndpointScorer(endpoint).topk(TEXTS, 0)
    assert time.monotonic() - began < 7


def test_nobody_listens(start: Start):
    server = start()
    endpoint = opened(server, retries=0).endpoint
    with pytest.raises(EndpointError, match="connection refused"):
        EndpointScorer(
            type(endpoint)(Client("http://127.0.0.1:9/v1", retries=0), "teacher", num_tokens=V, asking=endpoint.asking)
        ).topk(TEXTS, 0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no_logprobs", "has no `prompt_logprobs`"),
        ("short", "speaks of 5 tokens where 6 were sent"),
        ("other_ids", "no log-probability of id 6 at token 1"),
        ("nan", "log-probability of token 2 is nan"),
        ("above_zero", "log-probability of token 2 is 0.5"),
        ("two_choices", "not one choice"),
    ],
)
def test_scores_that_cannot_be_right_are_an_error_at_once(start: Start, fault: str, reason: str):
    server = start()
    endpoint = opened(server, k=3).endpoint
    server.fault = lambda number, body: fault
    first = len(server.asked)
    with pytest.raises(EndpointError, match=reason):
        EndpointScorer(endpoint).topk(TEXTS[:1], 3)
    assert len(server.asked) == first + 1, "asking again would not mend it"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no_logprobs", "tokens and no log-probabilities"),
        ("short", r"\d tokens and \d log-probabilities"),
        ("other_ids", "id 100000, and the policy has 320"),
        ("nan", "of a completion is nan"),
        ("aborted", "ended with 'abort'"),
    ],
)
def test_completions_that_cannot_be_right_are_an_error(start: Start, fault: str, reason: str):
    server = start()
    endpoint = opened(server).endpoint
    server.fault = lambda number, body: fault
    with pytest.raises(EndpointError, match=reason):
        EndpointSampler(endpoint, processed=False, needs_law=True).generate(TEXTS[:1], Sampling(6))


def test_text_is_never_encoded_again(start: Start):
    server = start(dialect="text")
    with pytest.raises(EndpointError, match="no token ids"):
        EndpointSampler(opened(server).endpoint, processed=False, needs_law=True).generate(TEXTS[:1], Sampling(6))


def test_a_refusal_is_not_repeated(start: Start):
    server = start()
    endpoint = opened(server).endpoint
    server.fault, first = lambda number, body: "404", len(server.asked)
    with pytest.raises(Refused, match="HTTP 404: not now"):
        EndpointScorer(endpoint).topk(TEXTS[:1], 0)
    assert len(server.asked) == first + 1


@pytest.mark.usefixtures("delays")
def test_the_first_failure_ends_the_others(start: Start):
    server = start()
    endpoint = opened(server, concurrency=8, timeout_seconds=30.0).endpoint
    server.fault = lambda number, body: "400" if body["prompt"] == [9] * 5 else "hang"
    began = time.monotonic()
    with pytest.raises(Refused):
        EndpointScorer(endpoint).topk([*TEXTS, [9] * 5], 0)
    assert time.monotonic() - began < 5, "those that hang are cut off"
    assert [t for t in threading.enumerate() if t.name.startswith("endpoint")] == []


def test_retry_after_as_seconds_and_as_a_date():
    from email.utils import formatdate

    assert _retry_after("7") == 7 and _retry_after("0.5") == 0.5 and _retry_after(None) is None
    assert _retry_after(formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert _retry_after(formatdate(time.time() - 30)) == 0 and _retry_after("soon") is None


# Logits made of the most probable tokens


def rows_of(logits: torch.Tensor, k: int, size: int = 12) -> TopKRows:
    best = logits.log_softmax(-1).topk(k, dim=-1)
    return TopKRows(best.indices, best.values, size)


def test_a_divergence_over_the_most_probable_and_one_bucket_is_exact():
    torch.manual_seed(0)
    logits = torch.randn(5, 12) * 3
    for k in (1, 4, 11, 12):
        rows = rows_of(logits, k)
        ids = rows.ids_NK[:, : min(k, 11)]
        expected = coarsen(logits, ids).softmax(-1)
        assert torch.allclose(coarsen(rows.logits(slice(None)), ids).softmax(-1), expected, atol=2e-6)
    assert torch.allclose(rows_of(logits, 12).logits(slice(1, 3)), logits[1:3].log_softmax(-1), atol=1e-6)


def test_ids_that_only_one_side_has_are_left_out():
    logits = torch.randn(3, 16)
    logits[:, 12:] += 3.0  # padding of the teacher's vocabulary
    rows = rows_of(logits, 16)
    assert torch.allclose(rows.logits(slice(None)).softmax(-1), logits[:, :12].softmax(-1), atol=1e-6)


def test_a_bucket_that_rounding_left_empty_keeps_a_little():
    sure = torch.full((1, 12), -60.0)
    sure[0, 3] = 0.0
    value = rows_of(sure, 2).logits(slice(None))
    assert torch.isfinite(value).all() and value.argmax() == 3
    assert value[0, 0] == pytest.approx(-60.0, abs=1.0), "no token outside is more probable than the least inside"


def test_rows_follow_the_temperature_of_the_batch():
    logits = torch.randn(2, 12)
    rows = rows_of(logits, 12)
    grid = TopKGrid(rows.ids_NK[None], rows.values_NK[None], 12, temperature=0.5)
    taken = grid.take((torch.tensor([0]), torch.tensor([0])))
    assert torch.allclose(taken.logits(slice(None))[0], logits[1].log_softmax(-1) / 0.5, atol=1e-5)


def test_the_sampler_here_and_there_draw_the_same(start: Start, model_dir: Path):  # noqa: F811
    """The fake server is no easier than the real thing: it answers one request at a time from one seed."""
    server = start()
    policy = load_policy(str(model_dir))
    sampler = EndpointSampler(opened(server).endpoint, processed=False, needs_law=True)
    from statewise.types import derive_seed

    (found,) = sampler.generate(TEXTS[:1], Sampling(6, seed=1, stop_ids=policy.stop_ids))
    own = InProcessSampler(policy.model, pad_id=0)
    (expected,) = own.generate(TEXTS[:1], Sampling(6, seed=derive_seed(1, "row", 0), stop_ids=policy.stop_ids))
    assert found.tokens == expected.tokens

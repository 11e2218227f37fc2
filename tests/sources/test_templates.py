"""What is supervised: an answer and exactly one end, nothing that the template supplies, one BOS, prompts as sampled."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.conftest import TEMPLATES, build_tokenizer

from statewise.errors import DataError
from statewise.sources.templates import (
    encode_conversation,
    encode_prompt,
    encode_prompt_completion,
    encode_text,
    preview,
)
from statewise.types import Example, Rollout, Segment

Make = Callable[..., Any]
CHATML = ["chatml", "tags", "tags_without_end", "tags_around_all"]
ASK = [{"role": "user", "content": "what is two plus three"}]
ANSWER = {"role": "assistant", "content": "it is five"}
TALK = [
    {"role": "system", "content": "you are fine"},
    *ASK,
    ANSWER,
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "bye now"},
]


def ids_of(segments: Sequence[Segment]) -> list[int]:
    return [t for s in segments for t in s.tokens]


def marked(tokenizer: Any, segments: Sequence[Segment]) -> str:
    return preview(tokenizer, Rollout(tuple(segments), Example("")))


def supervised(tokenizer: Any, segments: Sequence[Segment]) -> list[str]:
    return [tokenizer.decode(list(s.tokens)) for s in segments if s.train]


def test_the_sampled_text_of_a_known_template(make: Make):
    tokenizer = make("chatml", eos="<|im_end|>")
    segments = encode_conversation(tokenizer, TALK)
    assert marked(tokenizer, segments) == (
        "<|im_start|>system\nyou are fine<|im_end|>\n<|im_start|>user\nwhat is two plus three<|im_end|>\n"
        "<|im_start|>assistant\n⟦it is five<|im_end|>⟧\n<|im_start|>user\nthanks<|im_end|>\n"
        "<|im_start|>assistant\n⟦bye now<|im_end|>⟧\n"
    )
    assert ids_of(segments) == tokenizer.apply_chat_template(TALK, return_dict=False)
    assert {(s.author, s.train) for s in segments} == {("prompt", False), ("dataset", True)}


@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>"])
@pytest.mark.parametrize("template", CHATML)
def test_every_answer_and_one_end_each(make: Make, template: str, eos: str):
    """With tags and without, and also where the template's end token is not the tokenizer's EOS."""
    tokenizer = make(template, eos=eos)
    segments = encode_conversation(tokenizer, TALK)
    assert supervised(tokenizer, segments) == ["it is five<|im_end|>", "bye now<|im_end|>"]
    assert ids_of(segments) == tokenizer.apply_chat_template(TALK, return_dict=False)


@pytest.mark.parametrize("written", ["it is five</s>", "it is five</s></s>\n", "it is five</s> </s>"])
@pytest.mark.parametrize("template", ["no_end", "llama2", None])
def test_an_end_written_out_in_the_data_is_not_doubled(make: Make, template: str | None, written: str):
    tokenizer = make(template)
    if template is None:
        segments = encode_prompt_completion(tokenizer, "what is ", written)
    else:
        segments = encode_conversation(tokenizer, [*ASK, {"role": "assistant", "content": written}])
    assert [t.replace(" </s>", "</s>").lstrip() for t in supervised(tokenizer, segments)] == ["it is five</s>"]
    assert ids_of(segments).count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("template", CHATML)
def test_the_templates_end_written_out_in_the_data_is_not_doubled(make: Make, template: str):
    tokenizer = make(template, eos="</s>")
    segments = encode_conversation(tokenizer, [*ASK, {"role": "assistant", "content": "it is five<|im_end|>"}])
    assert supervised(tokenizer, segments) == ["it is five<|im_end|>"]
    assert "<|im_end|><|im_end|>" not in marked(tokenizer, segments)


def test_eos_is_appended_to_every_turn_of_a_template_without_end(make: Make):
    tokenizer = make("no_end")
    assert marked(tokenizer, encode_conversation(tokenizer, TALK)) == (
        "system: you are fine\nuser: what is two plus three\nassistant: ⟦it is five</s>⟧\nuser: thanks\n"
        "assistant: ⟦bye now</s>⟧\n"
    )


def test_whitespace_of_the_answer_is_its_own_and_the_templates_is_not(make: Make):
    segments = encode_conversation(make("no_end"), [*ASK, {"role": "assistant", "content": "it is five\n\n"}])
    assert marked(make("no_end"), segments).endswith("assistant: ⟦it is five\n\n</s>⟧\n")
    chatml = make("chatml")
    segments = encode_conversation(chatml, [*ASK, {"role": "assistant", "content": "it is five \n"}])
    assert supervised(chatml, segments) == ["it is five \n<|im_end|>"]


def test_only_the_first_end_token_of_a_conversations_end_is_supervised(make: Make):
    """Phi 3 writes <|end|> and then EOS."""
    tokenizer = make("phi")
    assert marked(tokenizer, encode_conversation(tokenizer, [*ASK, ANSWER])).endswith("⟦it is five<end_turn>⟧\n</s>")


def test_an_answer_that_ends_in_another_special_token_keeps_it(make: Make):
    tokenizer = make("chatml")
    segments = encode_conversation(tokenizer, [*ASK, {"role": "assistant", "content": "it is <turn>"}])
    assert supervised(tokenizer, segments) == ["it is <turn><|im_end|>"]


def test_what_the_inference_prompt_supplies_is_not_supervised_though_tagged(make: Make):
    tokenizer = make("think")
    segments = encode_conversation(tokenizer, [*ASK, ANSWER])
    assert supervised(tokenizer, segments) == ["it is five<|im_end|>"]
    assert list(segments[0].tokens) == encode_prompt(tokenizer, ASK)


@pytest.mark.parametrize("template", ["chatml", "tags"])
def test_pad_equal_to_eos_changes_nothing(make: Make, template: str):
    same, other = make(template, eos="<|im_end|>", pad="<|im_end|>"), make(template, eos="<|im_end|>")
    assert encode_conversation(same, TALK) == encode_conversation(other, TALK)
    assert encode_text(same, "hello world")[-1].tokens[-1] == same.pad_token_id


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", ["gemma", "llama2", "chatml"])
def test_one_bos(make: Make, template: str, adds_bos: bool):
    """Whether the template writes it, the tokenizer adds it, or both; none where neither does."""
    tokenizer = make(template, adds_bos=adds_bos)
    bos = tokenizer.bos_token_id
    expected = int(adds_bos or template != "chatml")
    for ids in (ids_of(encode_conversation(tokenizer, [*ASK, ANSWER])), encode_prompt(tokenizer, ASK)):
        assert ids.count(bos) == expected and (not expected or ids[0] == bos)
    texts = [
        encode_prompt(tokenizer, "hello"),
        encode_prompt(tokenizer, "<s>hello"),
        encode_prompt(tokenizer, "<s><s>hello"),
    ]
    assert [ids.count(bos) for ids in texts] == [int(adds_bos), 1, 1]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_supervises_all_but_the_first_token_and_one_end(make: Make, adds_bos: bool):
    tokenizer = make(adds_bos=adds_bos)
    for text in ("hello world bye", "hello world bye</s>"):
        first, rest = encode_text(tokenizer, text)
        assert len(first.tokens) == 1 and (first.author, first.train) == ("prompt", False)
        assert ids_of([first, rest]) == [*tokenizer("hello world bye")["input_ids"], tokenizer.eos_token_id]
        assert (tokenizer.bos_token_id in rest.tokens) is False and rest.train
        assert first.tokens[0] == tokenizer.bos_token_id or not adds_bos


def test_a_template_that_forgets_earlier_reasoning_is_refused_where_it_matters(make: Make):
    tokenizer = make("forgets")
    thought = [*ASK, {"role": "assistant", "content": "<think>two</think>it is five"}]
    assert supervised(tokenizer, encode_conversation(tokenizer, thought)) == ["<think>two</think>it is five<|im_end|>"]
    with pytest.raises(DataError, match=r"up to message 1 differently .* generation .* model\.chat_template"):
        encode_conversation(tokenizer, [*thought, {"role": "user", "content": "thanks"}, ANSWER])
    last = encode_prompt_completion(tokenizer, [*thought, {"role": "user", "content": "thanks"}], [ANSWER])
    assert supervised(tokenizer, last) == ["it is five<|im_end|>"]


def test_an_answer_stands_behind_the_whole_inference_prompt(make: Make):
    """Also where the template would render the past without a part of it; earlier answers can't be trained then."""
    tokenizer = make("opens")
    segments = encode_conversation(tokenizer, [*ASK, ANSWER])
    assert list(segments[0].tokens) == encode_prompt(tokenizer, ASK)
    assert marked(tokenizer, segments).endswith("assistant\n<think></think>\n⟦it is five<|im_end|>⟧\n")
    with pytest.raises(DataError, match="up to message 2 differently"):
        encode_conversation(tokenizer, TALK)
    last = encode_prompt_completion(tokenizer, TALK[:-1], TALK[-1:])
    assert supervised(tokenizer, last) == ["bye now<|im_end|>"]


def test_messages_of_a_prompt_are_not_supervised(make: Make):
    for template in CHATML:
        tokenizer = make(template)
        segments = encode_prompt_completion(tokenizer, TALK[:4], TALK[4:])
        assert supervised(tokenizer, segments) == ["bye now<|im_end|>"]
        assert list(segments[0].tokens) == encode_prompt(tokenizer, TALK[:4])


def test_tools_are_not_supervised(make: Make):
    tokenizer = make("chatml")
    talk = [*ASK, {"role": "assistant", "content": "2 plus 3"}, {"role": "tool", "content": "5"}, ANSWER]
    assert supervised(tokenizer, encode_conversation(tokenizer, talk)) == ["2 plus 3<|im_end|>", "it is five<|im_end|>"]


def test_chat_true_makes_text_a_conversation(make: Make):
    tokenizer = make("chatml")
    as_text = encode_prompt_completion(tokenizer, ASK[0]["content"], "it is five", chat=True)
    assert as_text == encode_conversation(tokenizer, [*ASK, ANSWER])
    assert encode_prompt(tokenizer, ASK[0]["content"], chat=True) == encode_prompt(tokenizer, ASK)
    with pytest.raises(DataError, match="chat = false"):
        encode_prompt_completion(tokenizer, ASK, [ANSWER], chat=False)


def test_a_completion_whose_first_token_would_join_the_prompts_last(make: Make):
    """The prompt's ids are what the sampler starts from; a joint tokenisation that changes them is not used."""
    tokenizer = make()
    prompt, completion = "hello wor", "ld"
    alone = tokenizer(prompt)["input_ids"]
    assert tokenizer(prompt + completion)["input_ids"][: len(alone)] != alone  # the case at hand
    segments = encode_prompt_completion(tokenizer, prompt, completion)
    assert list(segments[0].tokens) == alone
    assert supervised(tokenizer, segments) == ["ld</s>"]


def test_an_answer_whose_first_token_would_join_the_generation_prompts_last(make: Make):
    for template in CHATML:
        tokenizer = make(template)
        segments = encode_conversation(tokenizer, [*ASK, {"role": "assistant", "content": "\nit is five"}])
        assert list(segments[0].tokens) == encode_prompt(tokenizer, ASK)
        assert supervised(tokenizer, segments) == ["\nit is five<|im_end|>"]


def test_nothing_supervised_shows_the_sample(make: Make):
    with pytest.raises(DataError, match=r"no supervised token.*what is two plus three"):
        encode_conversation(make("chatml"), ASK)


def test_a_generation_block_that_marks_nothing_is_not_believed(make: Make):
    tokenizer = build_tokenizer("chatml")
    tokenizer.chat_template += "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert supervised(tokenizer, encode_conversation(tokenizer, TALK)) == ["it is five<|im_end|>", "bye now<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("gemma", TALK, "System role not supported"),
        (None, TALK, r"no chat template.*model\.chat_template"),
        ("chatml", [ANSWER, *ASK], "the first is the assistant's"),
    ],
)
def test_refusals(make: Make, template: str | None, messages: list, reason: str):
    with pytest.raises(DataError, match=reason):
        encode_conversation(make(template), messages)


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        encode_text(tokenizer, "hello")


pieces = st.sampled_from([*"ab 5\n\té世🙂", "hello", " world", "</think>"])
texts = st.lists(pieces, min_size=1, max_size=12).map("".join).filter(str.strip)
TOKENIZERS = {name: build_tokenizer(name, adds_bos=name in ("gemma", "no_end")) for name in TEMPLATES}


@settings(max_examples=150, deadline=None)
@given(
    template=st.sampled_from(sorted(set(TEMPLATES) - {"forgets", "opens"})),
    turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
)
def test_any_conversation(template: str, turns: list[tuple[str, str]]):
    """One end an answer, the answer before it, and before the first answer the ids that the sampler starts from."""
    tokenizer = TOKENIZERS[template]
    talk = [{"role": r, "content": c} for pair in turns for r, c in zip(("user", "assistant"), pair, strict=True)]
    segments = encode_conversation(tokenizer, talk)
    ends = {tokenizer.convert_tokens_to_ids(e) for e in ("</s>", "<|im_end|>", "<end_turn>")}
    answers = [s for s in segments if s.train]
    assert len(answers) == len(turns)
    for segment, (_, answer) in zip(answers, turns, strict=True):
        assert segment.tokens[-1] in ends and not ends & set(segment.tokens[:-1])
        assert tokenizer.decode(list(segment.tokens[:-1])).strip() == answer.strip()
    assert list(segments[0].tokens) == encode_prompt(tokenizer, talk[:1])


@settings(max_examples=100, deadline=None)
@given(prompt=texts, completion=texts, adds_bos=st.booleans())
def test_any_text_pair(prompt: str, completion: str, adds_bos: bool):
    tokenizer = TOKENIZERS["no_end" if adds_bos else "chatml"]
    before, after = encode_prompt_completion(tokenizer, prompt, completion)
    assert list(before.tokens) == encode_prompt(tokenizer, prompt)
    assert tokenizer.decode(list(after.tokens)) == completion + "</s>"

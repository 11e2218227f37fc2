"""Hint files: what the imitator is shown, and which hint and delimiter are chosen."""

from pathlib import Path

import pytest

from statewise.errors import DataError, RecipeError
from statewise.sources.hints import choose_delimiter, choose_hint, filled, load_hint, question_of, shipped_hints
from statewise.types import Example

ASKED = Example("a", ({"role": "user", "content": "two plus three"},), answer="5")
PLAIN = Example("b", (), "what is two plus three it is ", answer="5")


def shown(tokenizer, hint, example, answer, delimiter=None):
    return tokenizer.decode(load_hint(hint).encode(tokenizer, example, answer, delimiter))


@pytest.mark.parametrize("name", shipped_hints())
def test_shipped_hints_show_question_and_answer(make, name):
    tokenizer, example = make("chatml"), PLAIN if name == "base" else ASKED
    text = shown(tokenizer, name, example, "It is 5 now.", "####")
    assert question_of(example).strip() in text
    assert "It is 5 now." in text
    assert "{" not in text.replace("\\boxed{}", "")
    end = question_of(PLAIN) if name == "base" else "<|im_start|>assistant\n"
    assert text.endswith(end), "both streams must end in the same state"


def test_the_finish_belongs_to_the_delimiter(make):
    assert "####" in shown(make("chatml"), "instruct", ASKED, "5", "####")
    assert "boxed" in shown(make("chatml"), "instruct", ASKED, "5", "\\boxed{")
    without = shown(make("chatml"), "instruct", ASKED, "5", None)
    assert "####" not in without
    assert "boxed" not in without


def test_values_are_not_filled_again():
    assert filled("{answer} {question} {x}", {"answer": "{question}", "question": "q"}) == "{question} q {x}"


def test_system_messages(make):
    example = Example("a", ({"role": "system", "content": "hello"}, *ASKED.messages))
    text = shown(make("chatml"), "instruct", example, "5")
    assert text.startswith("<|im_start|>system\nhello\n\nYou write")
    assert text.count("<|im_start|>system") == 1
    assert shown(make("chatml"), "echo", example, "5").startswith("<|im_start|>system\nhello<|im_end|>")
    # A template that refuses system messages gets them in front of the question.
    gemma = shown(make("gemma"), "instruct", ASKED, "5")
    assert "system" not in gemma
    assert gemma.index("You write") < gemma.index("two plus three")


def test_earlier_turns_are_part_of_the_question():
    turns = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, *ASKED.messages)
    assert question_of(Example("a", turns)) == "user: hi\n\nassistant: yes\n\nuser: two plus three"


def test_hint_and_prompt_must_be_of_one_form(make):
    with pytest.raises(DataError, match="sample 'b': is plain text, and the hint is for conversations"):
        load_hint("instruct").encode(make("chatml"), PLAIN, "5", None)
    with pytest.raises(DataError, match="sample 'a': is a conversation, and the hint is for plain text"):
        load_hint("base").encode(make("chatml"), ASKED, "5", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delimiter = 'x'", "expected either messages or text"),
        ("text = 'no such thing'", "{answer} stands nowhere"),
        ("text = '{answer}'\nhaeding = 'x'", "haeding: unknown key"),
        ("text = ", "is not valid TOML"),
        ("[[messages]]\nrole = 'assistant'\ncontent = '{answer}'", "must be user"),
        ("[[messages]]\nrole = 'user'\ncontent = '{answer} {prompt}'", "{prompt} is for hints with `text`"),
    ],
)
def test_faulty_files(tmp_path: Path, text, message):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(RecipeError, match=message.replace("{", r"\{")):
        load_hint("own.toml", tmp_path)
    with pytest.raises(RecipeError, match="did you mean 'instruct'"):
        load_hint("instrukt", tmp_path)


def test_choices(make):
    tokenizer = make("chatml")
    assert (choose_hint(tokenizer, ASKED), choose_hint(tokenizer, PLAIN)) == ("instruct", "base")
    instruct = load_hint("instruct")
    assert choose_delimiter(instruct, ["a #### 5", "b #### 6", "c"]) == "####"
    assert choose_delimiter(instruct, ["\\boxed{5} ####", "\\boxed{6}"]) == "\\boxed{"
    assert choose_delimiter(instruct, ["a", "b", "#### 4"]) is None
    assert choose_delimiter(load_hint("thinking"), ["#### 5"]) == "</think>"

"""The tiny tokenizer and its chat template."""

from typing import Any

import pytest

from statewise.tiny import TASKS, model_path, tasks
from statewise.tiny.mixture import render_chat
from statewise.tiny.tokenizer import END, PAD, START

CHAT = [
    {"role": "user", "content": "How many cups?"},
    {"role": "assistant", "content": "3 + 4 = 7.\n#### 7"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "#### 12"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


def test_it_has_512_ids_and_the_special_ones_first(tokenizer: Any) -> None:
    assert len(tokenizer) == 512
    assert tokenizer.convert_tokens_to_ids([PAD, START, END]) == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (END, PAD, None)


@pytest.mark.parametrize("text", ["3 + 4 = 7.\n#### 7", "naïve café, 你好 🙂", "a  b\t\n c", " leading", ""])
def test_any_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_task_text_encodes_and_survives_the_round_trip(tokenizer: Any) -> None:
    texts = [row["text"] for row in tasks.texts("test", 200)]
    for name in ("tiny:facts", "tiny:beliefs", "tiny:math"):
        for row in tasks.rows(name, "test", 200):
            texts += [row["prompt"][0]["content"], *row.get("choices", [])]
    for style in ("plain", "terse", "verbose"):
        texts += [row["completion"][0]["content"] for row in tasks.math_problems("train", 100, style=style)]
    assert len(TASKS) == 4 and tokenizer.unk_token is None
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.batch_decode(encoded) == texts


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer.tokenize("120+34") == ["1", "2", "0", "+", "3", "4"]


def test_the_template_renders_what_pretraining_saw(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == render_chat("What?", "This.")
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert render_chat("What?", "This.").startswith(prompt)
    assert render_chat("What?", "This.")[len(prompt) :] == f"This.{END}\n"


def test_the_template_marks_content_and_end_of_every_answer_and_nothing_else(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors=None
    )
    marked = [i for i, on in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if on]
    assert tokenizer.decode(marked) == f"{CHAT[1]['content']}{END}{CHAT[3]['content']}{END}"

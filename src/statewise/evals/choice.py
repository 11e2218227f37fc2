"""Multiple choice by likelihood: the model picks the answer that it finds most probable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from statewise.errors import DataError
from statewise.evals.likelihood import Likelihood, likelihoods
from statewise.evals.prompts import Prompt, PromptedTask, encode, encode_answer, shown
from statewise.evals.rows import FileTask, Row, TinyTask
from statewise.types import EvalContext

Record = dict[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Choosing(PromptedTask):
    """`normalize`: a choice's likelihood is the sum over its tokens, or that a token or a character; records hold all scores.

    `separator`: text before each choice where not asked in chat.
    """

    normalize: Literal["sum", "token", "character"] = "sum"
    separator: str = " "

    @property
    def is_random(self) -> bool:
        return False

    def check_row(self, row: Row) -> None:
        super().check_row(row)
        self.choices(row)

    def choices(self, row: Row) -> tuple[list[str], int]:
        """The texts that are compared, and which is right."""
        choices = row.get("choices")
        if isinstance(choices, Mapping):  # the layout of some hub datasets: {"text": [...], "label": [...]}
            choices = choices.get("text")
        if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
            raise DataError(f"choices: received {choices!r}, expected a list of at least two texts.")
        return [str(choice) for choice in choices], right_index(row.get("answer"), list(choices))

    def run(self, context: EvalContext) -> list[Record]:
        """Records with id, score, both scores, and the likelihoods."""
        chat = self.in_chat(context.tokenizer)
        chosen = self.chosen(context)
        prompts = [self.prompt(row, chat=chat) for _, row in chosen]
        answers = [self.choices(row) for _, row in chosen]
        groups = [
            encoded(context.tokenizer, prompt, texts, chat=chat, separator=self.separator)
            for prompt, (texts, _) in zip(prompts, answers, strict=True)
        ]
        scored = likelihoods(context, groups)
        return [
            {"id": name, **self._judge(values, texts, right), "prompt": shown(prompt), "choices": texts, **told(values)}
            for (name, _), prompt, (texts, right), values in zip(chosen, prompts, answers, scored, strict=True)
        ]

    def _judge(self, values: Sequence[Likelihood], texts: Sequence[str], right: int) -> Record:
        by = {
            "sum": most_likely([v.total for v in values]),
            "token": most_likely([v.mean for v in values]),
            "character": most_likely([v.total / len(text) for v, text in zip(values, texts, strict=True)]),
        }
        scores = {f"score_{name}": float(picked == right) for name, picked in by.items()}
        return {"score": scores[f"score_{self.normalize}"], **scores, "answer": right, "picked": by[self.normalize]}

    def extra(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Accuracy under each normalisation."""
        return {
            f"accuracy_{name}": fmean(r[f"score_{name}"] for r in records) for name in ("sum", "token", "character")
        }


def encoded(
    tokenizer: Any, prompt: Prompt, answers: Sequence[str], *, chat: bool, separator: str = " "
) -> tuple[list[int], list[list[int]]]:
    """Ids of the prompt and of each answer; not in chat the separator stands between them."""
    ids = encode(tokenizer, prompt, chat=chat)
    texts = answers if chat else [separator + answer for answer in answers]
    return ids, [encode_answer(tokenizer, prompt, ids, text, chat=chat) for text in texts]


def told(values: Sequence[Likelihood]) -> Record:
    """The likelihoods as a record holds them."""
    return {"logprobs": [v.total for v in values], "num_tokens": [v.num_tokens for v in values]}


def most_likely(values: Sequence[float]) -> int:
    """Index of the largest; the first of equals."""
    return max(range(len(values)), key=lambda i: (values[i], -i))


def right_index(answer: Any, choices: Sequence[Any]) -> int:
    """The index of the right choice, given as an index, as a letter, or as the choice itself."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if answer in choices:
        return list(choices).index(answer)
    if isinstance(answer, str):
        text = answer.strip()
        if len(text) == 1 and text.upper() in LETTERS[: len(choices)]:
            return LETTERS.index(text.upper())
        if text.isdecimal() and int(text) < len(choices):
            return int(text)
    raise DataError(
        f"answer: received {answer!r}, expected an index below {len(choices)}, a letter up to "
        f"{LETTERS[len(choices) - 1]}, or one of the choices."
    )


class Choice(FileTask, Choosing, kind="choice"):
    """Multiple choice of any file: columns `prompt`, `choices`, and `answer` (index, letter or text)."""

    def prepare(self, row: Row) -> Row:
        choices, answer = self.choices(row)
        return {**row, "choices": choices, "answer": answer}


class Mmlu(FileTask, Choosing, kind="mmlu"):
    """MMLU (columns subject, question, choices, answer), zero-shot: the letters' likelihoods after "Answer:"."""

    data: str = "cais/mmlu"
    config: str | None = "all"
    chat: bool | Literal["auto"] = False

    def prepare(self, row: Row) -> Row:
        options, question = self.field(row, "choices"), str(self.field(row, "question")).strip()
        subject = str(self.field(row, "subject")).replace("_", " ")
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
        head = f"The following are multiple choice questions (with answers) about {subject}."
        return {
            **row,
            "prompt": f"{head}\n\n{question}\n{listed}\nAnswer:",
            "choices": list(LETTERS[: len(options)]),
            "answer": right_index(self.field(row, "answer"), options),
        }


class Arc(FileTask, Choosing, kind="arc"):
    """ARC (columns question, choices with text and label, answerKey), zero-shot: the likelihoods of the answers' texts."""

    data: str = "allenai/ai2_arc"
    config: str | None = "ARC-Challenge"
    chat: bool | Literal["auto"] = False

    def prepare(self, row: Row) -> Row:
        choices, key = self.field(row, "choices"), self.field(row, "answerKey")
        labels = list(choices.get("label", ())) if isinstance(choices, Mapping) else []
        if key not in labels:
            raise DataError(f"answerKey: received {key!r}, expected one of the labels in `choices`, {labels}.")
        prompt = f"Question: {str(self.field(row, 'question')).strip()}\nAnswer:"
        return {**row, "prompt": prompt, "choices": list(choices["text"]), "answer": labels.index(key)}


class TinyFacts(TinyTask, Choosing, kind="tiny:facts"):
    """Facts that the embedded model learned, in multiple choice."""


class TinyBeliefs(TinyTask, Choosing, kind="tiny:beliefs"):
    """Truth against common belief."""

    count: int = Field(350, ge=1)

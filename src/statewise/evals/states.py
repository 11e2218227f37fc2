"""The states of evaluation tasks: their prompts, and the right answers as the tasks score them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statewise.component import Task
from statewise.evals.choice import Choosing, encoded
from statewise.evals.generative import Generation
from statewise.evals.prompts import encode
from statewise.evals.text import CrossEntropy
from statewise.evals.truthful import TruthfulQa
from statewise.types import EvalContext


@dataclass(frozen=True)
class TaskText:
    """An example as token ids: what is asked, and the right answer (empty where answers are generated)."""

    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def task_texts(task: Task, context: EvalContext) -> list[TaskText]:
    """The examples that the task uses; [] for a task whose examples are not known (one of a plug-in)."""
    readers: list[tuple[type, Any]] = [
        (TruthfulQa, _truthful),
        (Choosing, _choosing),
        (Generation, _generation),
        (CrossEntropy, _text),
    ]
    reader = next((read for kind, read in readers if isinstance(task, kind)), None)
    if reader is None:
        return []
    return [
        TaskText(name, tuple(prompt), tuple(answer))
        for name, row in task.chosen(context)  # type: ignore[attr-defined]
        for prompt, answer in [reader(task, context.tokenizer, row)]
    ]


def _choosing(task: Choosing, tokenizer: Any, row: Any) -> tuple[list[int], list[int]]:
    chat = task.in_chat(tokenizer)
    texts, right = task.choices(row)
    prompt, answers = encoded(tokenizer, task.prompt(row, chat=chat), texts, chat=chat, separator=task.separator)
    return prompt, answers[right]


def _truthful(task: TruthfulQa, tokenizer: Any, row: Any) -> tuple[list[int], list[int]]:
    chat = task.in_chat(tokenizer)
    prompt, answers = encoded(tokenizer, task.prompt(row, chat=chat), row["true"][:1], chat=chat)
    return prompt, answers[0]


def _generation(task: Generation, tokenizer: Any, row: Any) -> tuple[list[int], list[int]]:
    chat = task.in_chat(tokenizer)
    return encode(tokenizer, task.prompt(row, chat=chat), chat=chat), []


def _text(task: CrossEntropy, tokenizer: Any, row: Any) -> tuple[list[int], list[int]]:
    ids = encode(tokenizer, str(row["text"]), chat=False)[: task.window]
    return ids[:1], ids[1:]

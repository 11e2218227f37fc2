"""Tasks that are answered in words: greedy or sampled, the final answer extracted and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, field_serializer, field_validator, model_validator

from statewise.answers import extract_answer, last_boxed, same_answer
from statewise.errors import RecipeError
from statewise.evals.prompts import PromptedTask, encode, shown
from statewise.evals.rows import FileTask, Purpose, Row, TinyTask
from statewise.types import Completion, EvalContext, Example, Sampling, derive_seed
from statewise.verifier import Judge, Verifier, parse_verifier

Record = dict[str, Any]


class Generation(PromptedTask):
    """`samples` completions a prompt (avg@k and pass@k above 1); a text is cut before the first of `stop`.

    verifier: what scores a text, as in a recipe's signal; none: the final answer is compared with the reference.
    """

    max_new_tokens: int = Field(512, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    samples: int = Field(1, ge=1)
    stop: tuple[str, ...] = ()
    verifier: Verifier | None = None
    usual_purpose: ClassVar[Purpose] = "target"

    @field_validator("verifier", mode="before")
    @classmethod
    def _parsed(cls, value: Any) -> Any:
        return None if value is None else parse_verifier(value, "verifier")

    @field_serializer("verifier")
    def _plain(self, value: Verifier | None) -> Any:
        return None if value is None else value.to_plain()

    def files(self) -> tuple[str, ...]:
        return () if self.verifier is None else self.verifier.files()

    def check_files(self, base_dir: Path) -> None:
        super().check_files(base_dir)
        self._judge(base_dir)

    @property
    def is_random(self) -> bool:
        return self.temperature > 0

    @model_validator(mode="after")
    def _samples_differ(self) -> Generation:
        if self.samples > 1 and self.temperature == 0:
            raise RecipeError(
                f"samples = {self.samples} with temperature = 0: greedy samples are all equal; raise the temperature."
            )
        return self

    def reference(self, row: Row) -> str:
        """The right answer: the column `answer`, of which the part after `####` where there is one."""
        answer = str(row.get("answer", ""))
        return (extract_answer(answer) or "") if "####" in answer or "\\boxed" in answer else answer.strip()

    def run(self, context: EvalContext) -> list[Record]:
        """Records with id, score (share of right samples), prompt, reference, and what was answered."""
        from statewise.models.load import stop_ids

        chat = self.in_chat(context.tokenizer)
        chosen = self.chosen(context)
        prompts = [self.prompt(row, chat=chat) for _, row in chosen]
        ids = [encode(context.tokenizer, prompt, chat=chat) for prompt in prompts]
        sampling = Sampling(
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_ids=stop_ids(context.model, context.tokenizer),
            seed=derive_seed(context.seed, "eval", self.name or self.kind),
        )
        completions = context.sampler.generate([x for x in ids for _ in range(self.samples)], sampling)
        judge = self._judge(context.base_dir)
        records = []
        for index, ((name, row), prompt) in enumerate(zip(chosen, prompts, strict=True)):
            own = completions[index * self.samples : (index + 1) * self.samples]
            reference = self.reference(row)
            example = Example(name, answer=reference, metadata=row)
            answers = [self._judged(context.tokenizer, c, example, judge) for c in own]
            score = fmean(a.pop("value") for a in answers)
            told = answers[0] if self.samples == 1 else {"samples": answers}
            records.append({"id": name, "score": score, "prompt": shown(prompt), "reference": reference, **told})
        return records

    def _judge(self, base_dir: Path) -> Judge:
        """The score of a text for an example."""
        if self.verifier is None:
            return lambda text, example: float(same_answer(extract_answer(text), example.answer))
        from statewise.sources.judging import scored

        verifier, judge = self.verifier, self.verifier.opened(base_dir)
        return lambda text, example: scored(verifier, judge, text, example) or 0.0

    def _judged(self, tokenizer: Any, completion: Completion, example: Example, judge: Judge) -> Record:
        response = tokenizer.decode(list(completion.tokens), skip_special_tokens=True)
        cuts = [place for text in self.stop if (place := response.find(text)) >= 0]
        response = response[: min(cuts)] if cuts else response
        value = judge(response, example)
        return {
            "response": response,
            "extracted": extract_answer(response),
            "correct": value >= 1.0,
            "value": value,
            # A text that ran on into its stop text was not cut short by the token limit.
            "stop_reason": "stop" if cuts else completion.stop_reason,
            "num_tokens": len(completion.tokens),
        }

    def extra(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """avg@k and pass@k with 95 % intervals over examples, k = 1, 2, 4 ... up to `samples`; lengths and shares of texts."""
        answers = [a for r in records for a in r.get("samples", [r])]
        found = {
            "mean_completion_tokens": fmean(a["num_tokens"] for a in answers),
            "truncated_share": fmean(a["stop_reason"] == "length" for a in answers),
            "extracted_share": fmean(a["extracted"] is not None for a in answers),
        }
        if self.samples > 1:
            found |= with_interval(f"avg@{self.samples}", [r["score"] for r in records])
            right = [sum(a["correct"] for a in r["samples"]) for r in records]
            ks = {*(1 << i for i in range(self.samples.bit_length())), self.samples}
            for k in sorted(ks):
                found |= with_interval(f"pass@{k}", [pass_at(k, self.samples, c) for c in right])
        return found


def with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean of per-example values, and its 95 % interval as `<name>/low` and `<name>/high`, within [0, 1]."""
    from statewise.stats.hypothesis import mean_interval

    low, high = mean_interval(values)
    return {name: fmean(values), f"{name}/low": max(low, 0.0), f"{name}/high": min(high, 1.0)}


def pass_at(k: int, samples: int, right: int) -> float:
    """Chance that k of the samples, drawn without repetition, hold a right one: 1 - C(n - c, k) / C(n, k)."""
    return 1 - comb(samples - right, k) / comb(samples, k)


class Generative(FileTask, Generation, kind="generative"):
    """Questions and answers of any file: columns `prompt` and `answer`, or training data's own: `messages`, or `prompt` and
    `completion`, whose last answer is then the reference.
    """

    def prepare(self, row: Row) -> Row:
        row = _asked(row) if row.get("answer") is None else row
        self.field(row, "answer")
        return row


def _asked(row: Row) -> Row:
    """A row of training data as a question; as it is where it holds no answer."""
    turns = row.get("messages")
    if "prompt" not in row and isinstance(turns, list) and len(turns) > 1 and turns[-1].get("role") == "assistant":
        row = {**row, "prompt": turns[:-1], "completion": turns[-1:]}
    written = row.get("completion")
    if isinstance(written, list) and written:
        written = written[-1].get("content")
    return {**row, "answer": written} if isinstance(written, str) else row


class Gsm8k(FileTask, Generation, kind="gsm8k"):
    """GSM8K (columns question and answer; the reference is the number after `####`)."""

    plain_template: ClassVar[str] = "Question: {prompt}\nAnswer:"

    data: str = "openai/gsm8k"
    config: str | None = "main"
    stop: tuple[str, ...] = ("\nQuestion:",)

    def prepare(self, row: Row) -> Row:
        return {**row, "prompt": self.field(row, "question"), "answer": self.field(row, "answer")}


class Svamp(Gsm8k, kind="svamp"):
    """SVAMP (columns Body, Question and Answer)."""

    data: str = "ChilleD/SVAMP"
    config: str | None = None

    def prepare(self, row: Row) -> Row:
        body, question = str(self.field(row, "Body")).strip(), str(self.field(row, "Question")).strip()
        body = body if body.endswith((".", "?", "!", ",")) else f"{body}."
        return {**row, "prompt": f"{body} {question}", "answer": self.field(row, "Answer")}


class Mawps(Gsm8k, kind="mawps"):
    """MAWPS (columns input and target). It has no one home on the hub: name its file in `data`."""

    data: str
    config: str | None = None

    def prepare(self, row: Row) -> Row:
        return {**row, "prompt": self.field(row, "input"), "answer": self.field(row, "target")}


class Competition(FileTask, Generation):
    """Problems whose answer goes into a box. Columns `problem` (or `question`) and `answer`."""

    plain_template: ClassVar[str] = "Problem: {prompt}\nSolution:"

    config: str | None = None
    max_new_tokens: int = Field(2048, ge=1)
    system: str | None = "Reason step by step, and put your final answer within \\boxed{}."

    def prepare(self, row: Row) -> Row:
        asked = row["problem"] if row.get("problem") is not None else self.field(row, "question")
        return {**row, "prompt": asked, "answer": self.field(row, "answer")}


class Aime(Competition, kind="aime"):
    """AIME: answers are integers from 0 to 999."""

    data: str = "HuggingFaceH4/aime_2024"
    split: str = "train"


class Amc(Competition, kind="amc"):
    """AMC, as numbers."""

    data: str = "math-ai/amc23"


class Minerva(Competition, kind="minerva"):
    """College problems of Minerva (OCWCourses): expressions, compared as mathematics (extra `math`).

    Without a column `answer`, the last box of the column `solution` is the reference.
    """

    data: str = "math-ai/minervamath"
    verifier: Verifier | None = Field("boxed", validate_default=True)

    def prepare(self, row: Row) -> Row:
        if row.get("answer") is None:
            row = {**row, "answer": last_boxed(str(self.field(row, "solution")))}
        return super().prepare(row)

    def reference(self, row: Row) -> str:
        return str(row["answer"]).strip()


class TinyMath(TinyTask, Generation, kind="tiny:math"):
    """Word problems of two and three steps, on numbers that no training problem has."""

    max_new_tokens: int = Field(96, ge=1)
    steps: list[int] = [2, 3]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "steps": tuple(self.steps)}

"""Tasks that are answered in words: greedy or sampled, the final answer extracted and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field, model_validator

from statewise.answers import extract_answer, same_answer
from statewise.errors import RecipeError
from statewise.evals.prompts import PromptedTask, encode, shown
from statewise.evals.rows import FileTask, Purpose, Row, TinyTask
from statewise.types import Completion, EvalContext, Sampling, derive_seed

Record = dict[str, Any]


class Generation(PromptedTask):
    """`samples` completions a prompt (avg@k and pass@k above 1); a text is cut before the first of `stop`."""

    max_new_tokens: int = Field(512, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    samples: int = Field(1, ge=1)
    stop: tuple[str, ...] = ()
    usual_purpose: ClassVar[Purpose] = "target"

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
        records = []
        for index, ((name, row), prompt) in enumerate(zip(chosen, prompts, strict=True)):
            own = completions[index * self.samples : (index + 1) * self.samples]
            reference = self.reference(row)
            answers = [self._judge(context.tokenizer, c, reference) for c in own]
            score = fmean(float(a["correct"]) for a in answers)
            told = answers[0] if self.samples == 1 else {"samples": answers}
            records.append({"id": name, "score": score, "prompt": shown(prompt), "reference": reference, **told})
        return records

    def _judge(self, tokenizer: Any, completion: Completion, reference: str) -> Record:
        response = tokenizer.decode(list(completion.tokens), skip_special_tokens=True)
        cuts = [place for text in self.stop if (place := response.find(text)) >= 0]
        response = response[: min(cuts)] if cuts else response
        extracted = extract_answer(response)
        return {
            "response": response,
            "extracted": extracted,
            "correct": same_answer(extracted, reference),
            # A text that ran on into its stop text was not cut short by the token limit.
            "stop_reason": "stop" if cuts else completion.stop_reason,
            "num_tokens": len(completion.tokens),
        }

    def extra(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """pass@k for k = 1, 2, 4 ... up to `samples`; completion lengths; shares cut short and with an answer."""
        answers = [a for r in records for a in r.get("samples", [r])]
        found = {
            "mean_completion_tokens": fmean(a["num_tokens"] for a in answers),
            "truncated_share": fmean(a["stop_reason"] == "length" for a in answers),
            "extracted_share": fmean(a["extracted"] is not None for a in answers),
        }
        if self.samples > 1:
            right = [sum(a["correct"] for a in r["samples"]) for r in records]
            ks = {*(1 << i for i in range(self.samples.bit_length())), self.samples}
            found |= {f"pass@{k}": fmean(pass_at(k, self.samples, c) for c in right) for k in sorted(ks)}
        return found


def pass_at(k: int, samples: int, right: int) -> float:
    """Chance that k of the samples, drawn without repetition, hold a right one: 1 - C(n - c, k) / C(n, k)."""
    return 1 - comb(samples - right, k) / comb(samples, k)


class Generative(FileTask, Generation, kind="generative"):
    """Questions and answers of any file: columns `prompt` and `answer`."""

    def prepare(self, row: Row) -> Row:
        self.field(row, "answer")
        return row


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


class TinyMath(TinyTask, Generation, kind="tiny:math"):
    """Word problems of two and three steps, on numbers that no training problem has."""

    max_new_tokens: int = Field(96, ge=1)
    steps: list[int] = [2, 3]

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "steps": tuple(self.steps)}

"""Our engines as a model of lm-evaluation-harness; needs the extra `lm-eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from statewise.errors import RecipeError
from statewise.evals.likelihood import AT_ONCE, context_length
from statewise.types import EvalContext, Sampling, derive_seed

DEFAULT_MAX_TOKENS = 256  # lm-eval's own
ROUND = 64  # tokens sampled between two looks for a stop text
KNOWN = {"do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks"}


class Engines(TemplateLM):
    """lm-eval's requests through the sampler and scorer of an evaluation; sums of log-probabilities are in nats."""

    def __init__(self, context: EvalContext):
        super().__init__()
        from statewise.models.load import stop_ids

        self.context, self.tokenizer = context, context.tokenizer
        self.max_length = context_length(context)
        self.stop_ids = stop_ids(context.model, context.tokenizer)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without context."""
        bos = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if bos is None else bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log p(continuation | context), whether greedy decoding gives it); a long context loses its beginning."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, before, answer) in enumerate(requests):
            room = self.max_length + 1 - len(answer)  # the last token is predicted and not read
            groups.setdefault(tuple(before[-max(room, 1) :]), []).append(index)
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        pairs = [(prompt, [requests[i][2] for i in indices]) for prompt, indices in groups.items()]
        places = list(groups.values())
        for start in range(0, len(pairs), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            scored = self.context.scorer.judge_answers(pairs[part])  # type: ignore[attr-defined]
            for indices, values in zip(places[part], scored, strict=True):
                for index, value in zip(indices, values, strict=True):
                    results[index] = value
            self.context.progress(min(start + AT_ONCE, len(pairs)), len(pairs))
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p(text) after the prefix token; a text longer than the context is read in windows."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            rolled = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in rolled]
            windows += own
            owners += [index] * len(own)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text, in the order of the requests."""
        results = [""] * len(requests)
        by_law: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_law.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        for indices in by_law.values():
            settings = normalize_gen_kwargs(requests[indices[0]].args[1], DEFAULT_MAX_TOKENS)
            texts = self._continue([requests[i].args[0] for i in indices], indices, dict(settings))
            for index, text in zip(indices, texts, strict=True):
                results[index] = text
        return results

    def _continue(self, prompts: Sequence[str], rows: Sequence[int], settings: dict[str, Any]) -> list[str]:
        unknown = set(settings) - KNOWN
        if unknown:
            raise RecipeError(f"lm_eval: the task's generation setting {sorted(unknown)[0]!r} has no counterpart here.")
        until = handle_stop_sequences(settings.get("until"), eos=self.tokenizer.decode([self.eot_token_id]))
        most = int(settings["max_gen_toks"])
        room = max(self.max_length - most, 1)
        ids = [self.tok_encode(prompt)[-room:] or [self.prefix_token_id] for prompt in prompts]
        law = Sampling(
            max_tokens=0,
            temperature=float(settings.get("temperature", 0.0)),
            top_p=float(settings.get("top_p", 1.0)),
            top_k=int(settings.get("top_k", 0)),
            stop_ids=self.stop_ids,
        )
        return [postprocess_generated_text(text, until, None) for text in self._sample(ids, rows, law, until, most)]

    def _sample(
        self, prompts: Sequence[list[int]], rows: Sequence[int], law: Sampling, until: Sequence[str], most: int
    ) -> list[str]:
        """Texts of at most `most` new tokens; those that hold a stop text are not continued."""
        from dataclasses import replace

        done: list[list[int]] = [[] for _ in prompts]
        texts, open_rows = [""] * len(prompts), list(range(len(prompts)))
        for start in range(0, most, ROUND):
            size = min(ROUND, most - start)
            part = replace(law, max_tokens=size, seed=derive_seed(self.context.seed, "lm_eval", start))
            starts = [[*prompts[i], *done[i]] for i in open_rows]
            found = self.context.sampler.generate(starts, part, rows=[rows[i] for i in open_rows])
            still = []
            for index, completion in zip(open_rows, found, strict=True):
                done[index] += completion.tokens
                texts[index] = self.tokenizer.decode(done[index], skip_special_tokens=True)
                full = len(prompts[index]) + len(done[index]) >= self.max_length
                if completion.stop_reason == "length" and not full and not any(s in texts[index] for s in until if s):
                    still.append(index)
            open_rows = still
            if not open_rows:
                break
        return texts

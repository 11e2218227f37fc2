"""What may be wrong with a recipe before it costs anything: data, tokenizer, ends, verifier, teachers, memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from statewise.errors import StatewiseError

if TYPE_CHECKING:
    from statewise.recipe import Recipe
    from statewise.teachers import TeacherModel
    from statewise.types import Rollout, World

LOOKED_AT = 32  # samples whose ends are looked at
PROFILED = (4, 8)  # prompts, and first tokens of a completion, at which teacher and policy are compared
# Nats. A teacher this far away at a first token most likely reads another prompt format; one this near has nothing to teach.
FAR, NEAR = 3.0, 1e-3

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; `facts` are plain values, `shown` is text for people."""

    check: str
    status: Status
    detail: str
    facts: dict[str, Any] = field(default_factory=dict)
    shown: str = ""


def examine(recipe: Recipe) -> Iterator[Finding]:
    """The findings, each as its check ends. An error of a check is a failed finding; the rest goes on without it."""
    first: dict[str, str] = {}
    for finding in _findings(recipe):
        cause = first.setdefault(finding.detail, finding.check)
        same = finding.status == "failed" and cause != finding.check
        yield replace(finding, detail=f"can't be told before {cause} is mended") if same else finding


def _findings(recipe: Recipe) -> Iterator[Finding]:
    yield from _run("tokenizer", lambda: _tokenizer(recipe))
    yield from _run("data", lambda: _data(recipe))
    yield from _templates(recipe)
    if _has_verifier(recipe):
        yield from _run("verifier", lambda: _verifier(recipe))
    if recipe.eval.tasks:
        yield from _run("evaluation", lambda: _evaluation(recipe))
    if recipe.model.sampler.engine != "built-in" and recipe.source.needs_policy:
        yield from _run("sampler", lambda: _sampler(recipe))
    for teacher in dict.fromkeys(recipe.models()):
        if not teacher.is_past_policy:
            yield from _run(f"teacher {teacher.name}", lambda teacher=teacher: _teacher(recipe, teacher))  # type: ignore[misc]
    yield from _run("memory", lambda: _memory(recipe))


def _run(name: str, check: Callable[[], Finding]) -> Iterator[Finding]:
    try:
        yield check()
    except StatewiseError as error:
        yield Finding(name, "failed", str(error))


def _world(recipe: Recipe) -> World:
    """The tokenizer and the data; no weights."""
    from statewise.models.load import load_tokenizer
    from statewise.types import World

    return World(tokenizer=load_tokenizer(recipe.model), seed=recipe.seed, base_dir=recipe.base_dir)


def _stop_ids(recipe: Recipe, tokenizer: Any) -> tuple[int, ...]:
    from statewise.models.load import read_stop_ids

    return read_stop_ids(recipe.model, tokenizer)


def _tokenizer(recipe: Recipe) -> Finding:
    """Every id has an embedding, and there is a token to stop at."""
    from statewise.models.load import empty_policy

    tokenizer = _world(recipe).tokenizer
    rows = int(empty_policy(recipe.model).get_input_embeddings().num_embeddings)
    largest, stops = max(tokenizer.get_vocab().values()), _stop_ids(recipe, tokenizer)
    facts = {
        "tokens": len(tokenizer),
        "embeddings": rows,
        "stop_ids": list(stops),
        "chat_template": tokenizer.chat_template is not None,
    }
    ends = ", ".join(repr(token) for token in tokenizer.convert_ids_to_tokens(list(stops)))
    detail = f"{len(tokenizer):,} tokens, {rows:,} embeddings, stops at {ends}"
    if largest >= rows:
        return Finding("tokenizer", "failed", f"id {largest} has no embedding ({rows} rows): not this model's.", facts)
    if not stops:
        return Finding("tokenizer", "failed", "no token ends a text, so sampling never stops; set eos_token.", facts)
    return Finding("tokenizer", "ok", detail, facts)


def _data(recipe: Recipe) -> Finding:
    """What a sample looks like, and whether what is trained ends with a token that stops."""
    from statewise.sources.templates import preview

    world = _world(recipe)
    if recipe.source.needs_policy or recipe.source.models():
        prompts = _prompts(recipe, world)
        text = world.tokenizer.decode(list(prompts[0])) if prompts else ""
        return Finding("data", "ok", "a prompt as the policy reads it:", {"prompt": text}, text)
    rollouts = recipe.source.sample(0, _multiple(recipe, LOOKED_AT), world)
    stops = set(_stop_ids(recipe, world.tokenizer))
    ended = sum(_last_trained(r) in stops for r in rollouts)
    text = preview(world.tokenizer, rollouts[0])
    facts = {"samples": len(rollouts), "with_end_token": ended, "preview": text}
    if ended == 0:
        detail = "no sample ends with a trained stop token, so the model won't learn to stop; see source.too_long."
        return Finding("data", "failed", detail, facts, text)
    status: Status = "ok" if ended == len(rollouts) else "warning"
    detail = f"{ended} of {len(rollouts)} samples end with a trained stop token; trained text is marked:"
    return Finding("data", status, detail, facts, text)


def _templates(recipe: Recipe) -> Iterator[Finding]:
    """A warning where plain text meets a chat template; data that can't be read have failed before."""
    from statewise.sources.plain import untemplated

    with suppress(StatewiseError):
        if doubt := untemplated(recipe.source, _world(recipe)):
            yield Finding("chat template", "warning", doubt)


def _last_trained(rollout: Rollout) -> int | None:
    trained = [s.tokens[-1] for s in rollout.segments if s.train and s.tokens]
    return trained[-1] if trained else None


def _multiple(recipe: Recipe, count: int) -> int:
    """At least a row's rollouts, near `count`."""
    size = max(1, *(getattr(leaf, "group_size", 1) for leaf in recipe.source.leaves))
    return max(size, count // size * size)


def _prompts(recipe: Recipe, world: World) -> list[tuple[int, ...]]:
    """The ids of the first prompts: where completions start."""
    from statewise.sources.prompts import PromptSource

    for leaf in recipe.source.leaves:
        if isinstance(leaf, PromptSource):
            return [prompt.tokens for prompt in leaf.prompts_at(0, PROFILED[0], world)]
    rollouts = recipe.source.sample(0, _multiple(recipe, PROFILED[0]), world)
    return [tuple(rollout.segments[0].tokens) for rollout in rollouts if not rollout.segments[0].train]


def _has_verifier(recipe: Recipe) -> bool:
    return any(hasattr(part, "verifier") for part in (*recipe.source.leaves, *recipe.signal))


def _verifier(recipe: Recipe) -> Finding:
    """The test that training would begin with."""
    from statewise.training.ready import check_verifiers

    check_verifiers(recipe, evaluation=False)
    world = _world(recipe)
    for part in (recipe.source, *recipe.signal):
        part.before_training(recipe.source, world)
    return Finding("verifier", "ok", "accepts reference answers, and neither nothing nor lists of all answers")


def _evaluation(recipe: Recipe) -> Finding:
    """Data and verifiers of the evaluation tasks."""
    from statewise.evals.results import task_name
    from statewise.training.ready import check_tasks, tasks_of

    check_tasks(recipe)
    names = [task_name(task) for _, task in tasks_of(recipe)]
    return Finding("evaluation", "ok", f"can begin: {', '.join(names)}", {"tasks": names})


def _sampler(recipe: Recipe) -> Finding:
    """Whether vLLM is here, or what its server can do."""
    from importlib.util import find_spec

    from statewise.errors import MissingExtra
    from statewise.models.load import load_policy

    url = recipe.model.sampler.url
    if url is None:
        if find_spec("vllm") is None:
            raise MissingExtra("vllm", "vllm", "model.sampler = 'vllm'")
        return Finding("sampler", "ok", "vLLM is installed")
    from statewise.training.remote import print_error
    from statewise.training.rollouts import probe_server

    probed = probe_server(recipe, load_policy(recipe.model), print_error)
    law = recipe.source.policy_temperature
    if law != 1.0 and not probed.processed:
        detail = (
            f"its log-probabilities are of temperature 1 and the source samples at {law:g}; start it with --logprobs-mode "
            "processed_logprobs."
        )
        return Finding("sampler", "failed", detail, probed.facts)
    return Finding("sampler", "ok", f"vLLM at {url}: same tokens", probed.facts, _able(probed.facts))


def _teacher(recipe: Recipe, wanted: TeacherModel) -> Finding:
    """Vocabulary, ends, the prompt in its own format, how far it is from the policy at the first tokens; what an endpoint
    can do."""
    from statewise.training.profile import kl_profile
    from statewise.training.sampling import open_world

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        world = open_world(recipe)
        teacher = world.open_model(wanted)
    doubts = [str(w.message) for w in said if "teacher" in str(w.message)]
    profile = kl_profile(world, teacher, _prompts(recipe, world), PROFILED[1])
    facts: dict[str, Any] = {"kl_policy_teacher": profile, "tokens": len(teacher.tokenizer)}
    facts |= {"endpoint": teacher.facts} if wanted.endpoint else {}
    other = _other_rendering(recipe, world.tokenizer, teacher.tokenizer)
    if other is not None:
        facts["prompt_in_its_own_format"] = other
        doubts.append("its own chat template renders the prompt otherwise; it will read the policy's rendering.")
    if profile and max(profile) > FAR:
        doubts.append(f"KL(policy, teacher) reaches {max(profile):.1f} nats at a first token.")
    if profile and max(profile) < NEAR:
        doubts.append("it hardly differs from the policy, so there is nothing to learn.")
    lines = [_able(teacher.facts)] if wanted.endpoint else []
    if profile:
        values = ", ".join(f"{value:.3f}" for value in profile)
        lines.append(f"KL(policy, teacher) at tokens 1, 2 ...: {values} nats")
    status: Status = "warning" if doubts else "ok"
    healthy = "same tokens" if wanted.endpoint else "same vocabulary and ends"
    return Finding(f"teacher {wanted.name}", status, " ".join(doubts) or healthy, facts, "\n".join(lines))


def _able(facts: dict[str, Any]) -> str:
    """What the probe of an endpoint found, in a line."""
    names = {
        "model": "model",
        "context": "context",
        "tokens_checked_by": "tokens checked by",
        "prompt_logprobs_by": "prompt log-probabilities by",
        "top_k": "most probable tokens",
        "logprobs_of": "samples' log-probabilities of",
        "seconds": "probe seconds",
    }
    return "endpoint: " + " | ".join(f"{words} {facts[name]}" for name, words in names.items() if name in facts)


def _other_rendering(recipe: Recipe, own: Any, other: Any) -> str | None:
    """The first prompt as the teacher's chat template renders it, where that differs."""
    if other is own or own.chat_template is None or other.chat_template is None:
        return None
    ask = [{"role": "user", "content": "2 + 2 = ?"}]
    ours, theirs = (t.apply_chat_template(ask, tokenize=False, add_generation_prompt=True) for t in (own, other))
    return None if ours == theirs else str(theirs)


def _memory(recipe: Recipe) -> Finding:
    """The estimate of `statewise train --dry-run` against what is free."""
    from statewise.training.plan import free_bytes, plan

    planned, free = plan(recipe), free_bytes()
    facts = {"bytes": planned.total_bytes, "free_bytes": free}
    detail = f"about {planned.total_bytes / 2**20:,.0f} MiB of {free / 2**20:,.0f} MiB free, without teachers"
    if planned.total_bytes > free:
        return Finding("memory", "failed", f"{detail}: lower batch.micro_tokens, or train a LoRA.", facts)
    return Finding("memory", "ok", detail, facts)

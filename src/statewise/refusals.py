"""Combinations that have no meaning, refused when the recipe is parsed: what was received, expected, how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statewise.component import BASE_COLUMNS, kinds
from statewise.errors import RecipeError

if TYPE_CHECKING:
    from statewise.recipe import Recipe


def refuse(recipe: Recipe) -> None:
    """Raise RecipeError where the recipe is void; the generic rule first, then the hand-written ones."""
    _unwritten(recipe)
    for rule in RULES:
        rule(recipe)


def _unwritten(recipe: Recipe) -> None:
    """Something reads a column that no source or signal writes."""
    everywhere = recipe.provided()
    readers = [(n, part, everywhere) for n, part in [("source", recipe.source), *_named("signal", recipe.signal)]]
    readers += [
        (where, part, recipe.provided(getattr(term.on, "author", None)))
        for where, term in _named("objective", recipe.objective)
        for part in term.parts
    ]
    for where, reader, provided in readers:
        missing = sorted(reader.columns_read() - provided - BASE_COLUMNS)
        if missing:
            raise RecipeError(
                f"{where}: '{reader.kind}' reads '{missing[0]}', which nothing in this recipe writes (source "
                f"'{recipe.source.kind}' and signals {[s.kind for s in recipe.signal]} write "
                f"{sorted(provided - BASE_COLUMNS)}). {_writer(missing[0])}"
            )


def _named(name: str, items: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{name}[{index}]", item) for index, item in enumerate(items)]


def _writer(column: str) -> str:
    writers = [f"{role} '{k}'" for role in ("source", "signal") for k, c in kinds(role).items() if column in c.writes]
    if column == "gold":
        return "Gold tokens exist on states of a source that has them" + (
            f": {', '.join(writers)}." if writers else "."
        )
    return f"Add {' or '.join(writers)}." if writers else "No registered source or signal writes it."


def _keep_best(recipe: Recipe) -> None:
    best = recipe.checkpoint.keep_best
    names = [getattr(t, "name", None) or t.kind for t in recipe.eval.tasks]
    if best is not None and best not in names:
        raise RecipeError(
            f"checkpoint.keep_best: received '{best}', expected the name of a task of eval.tasks: {names}."
        )


def _no_updates(recipe: Recipe) -> None:
    if all(term.coef == 0 for term in recipe.objective):
        raise RecipeError("objective: every coef is 0, so nothing would be trained.")


def _stale_behavior(recipe: Recipe) -> None:
    """A clip with one update a step has ratio 1 everywhere: legal, but a mistake where it is the point of the loss."""
    single = recipe.batch.minibatches * recipe.batch.epochs == 1
    constant = [t for t in recipe.objective if t.loss.kind == "clip" and getattr(t.loss, "advantage", None) is not None]
    if single and constant:
        raise RecipeError(
            "objective: PSFT's 'clip' compares the policy with that of the start of the step, and with one update a step "
            "they are the same, so it is plain NLL; set batch.minibatches or batch.epochs above 1."
        )


def _absent_author(recipe: Recipe) -> None:
    """A term about tokens of an author whose tokens no source trains."""
    authors = {author for leaf in recipe.source.leaves for author in leaf.authors}
    for where, term in _named("objective", recipe.objective):
        wanted = getattr(term.on, "author", None)
        if wanted is not None and wanted not in authors:
            raise RecipeError(
                f"{where}.on: received author = '{wanted}', and the source '{recipe.source.kind}' trains tokens of "
                f"{sorted(authors)} only, so the term would have no token."
            )


def _own_teacher(recipe: Recipe) -> None:
    """The teacher is the model that is trained."""
    own = recipe.model
    for model in recipe.models():
        if model.endpoint is None and (model.path, model.revision) == (own.path, own.revision):
            raise RecipeError(
                f"teacher = '{model.path}': is the model that is trained, so it has nothing to teach: its distributions are "
                "the policy's own and the first gradient is 0. Name another model; where the policy's own start is meant, "
                "beside a term that moves it away from there, say teacher = 'step0'."
            )


def _past_teacher(recipe: Recipe) -> None:
    """Nothing but the policy's own past to learn from: at the first step the policy is at the minimum of every term."""
    teachers = [s for s in recipe.signal if s.kind == "teacher"]
    past = teachers and all(model.is_past_policy for s in teachers for model in s.models())
    columns = {"teacher_logits", "teacher_logprobs", "teacher_advantages"}
    terms = [t for t in recipe.objective if t.coef != 0]
    still = all(columns & t.loss.columns_read() for t in terms)
    if past and still and all(getattr(s, "temperature", 1.0) == 1.0 for s in teachers):
        names = sorted({model.name for s in teachers for model in s.models()})
        raise RecipeError(
            f"teacher = {names}: every term compares the policy with its own past, and at the first step they are equal, so "
            "every loss and every gradient is 0 and stays 0. Add a term that learns something else, such as nll on gold "
            "tokens or a reward, or name another teacher."
        )


def _lone_rollouts(recipe: Recipe) -> None:
    """A baseline from a group of one."""
    for where, part in _named("signal", recipe.signal):
        baseline = getattr(part, "advantage", "none") if part.kind == "reward" else "none"
        lone = next((leaf for leaf in recipe.source.leaves if getattr(leaf, "group_size", 1) < 2), None)
        if baseline == "none" or lone is None or len(recipe.source.leaves) > 1:
            continue
        raise RecipeError(
            f"{where}: advantage = '{baseline}' compares a rollout with the others of its group, and the source "
            f"'{lone.kind}' gives groups of one, so every advantage would be 0. "
            + (
                "Set source.group_size above 1."
                if "group_size" in type(lone).model_fields
                else "Take source = 'policy'."
            )
        )


def _split_groups(recipe: Recipe) -> None:
    """Rollouts that are no whole groups. Mixtures look for themselves."""
    size = getattr(recipe.source, "group_size", 1)
    if recipe.batch.rollouts % size:
        raise RecipeError(
            f"batch.rollouts = {recipe.batch.rollouts}: expected a multiple of source.group_size = {size}, since a step "
            "holds whole groups."
        )


def _redrawn(recipe: Recipe) -> None:
    """Draws that are repeated until a batch is full, of a source that is not made for it."""
    if recipe.draws > 1 and recipe.source.kind != "policy":
        raise RecipeError(
            f"signal.reward: zero_variance = 'refill' asks the source for further groups of the policy, and the source is "
            f"'{recipe.source.kind}'. Expected source = 'policy'; elsewhere take zero_variance = 'drop', which leaves a smaller "
            "batch, or 'keep'."
        )


def _cut_support(recipe: Recipe) -> None:
    """Policy gradients on samples of another law than the policy's."""
    for leaf in recipe.source.leaves:
        cut = leaf.needs_policy and (getattr(leaf, "top_p", 1.0) < 1 or getattr(leaf, "top_k", 0) > 0)
        for where, term in _named("objective", recipe.objective) if cut else ():
            driven = sorted(c for c in term.loss.columns_read() if c == "behavior_logprobs" or "advantages" in c)
            if driven:
                raise RecipeError(
                    f"{where}: '{term.loss.kind}' reads '{driven[0]}', and the source '{leaf.kind}' samples with top_p or "
                    "top_k, from another law than the policy that the gradient and the ratio are about (the ratio of a "
                    "fresh policy would be the mass that was kept, not 1). Leave top_p = 1 and top_k = 0; a lower "
                    "temperature is allowed."
                )


def _second_signal(recipe: Recipe) -> None:
    """The second would overwrite what the first one wrote."""
    hints = {
        "reward": "To add rewards, let one verifier 'function' add them.",
        "teacher": "Several teachers, one a sample, are its settings `by` and `routes`; the policy's own start is 'reference'.",
    }
    seen: set[str] = set()
    for where, part in _named("signal", recipe.signal):
        if part.kind in seen:
            raise RecipeError(f"{where}: is a second '{part.kind}'; expected one. {hints.get(part.kind, '')}".rstrip())
        seen.add(part.kind)


def _second_diagnostic(recipe: Recipe) -> None:
    """Both would write the same file."""
    kinds_seen = [part.kind for part in recipe.diagnostics]
    for where, part in _named("diagnostics", recipe.diagnostics):
        if kinds_seen.count(part.kind) > 1:
            raise RecipeError(f"{where}: '{part.kind}' is named twice; expected once.")


def _own_samples(recipe: Recipe) -> None:
    """Gold tokens that the policy's own past drew: their expected gradient is 0 where the policy is still the same."""
    for leaf in recipe.source.leaves:
        teacher = getattr(leaf, "teacher", None)
        temperature = getattr(leaf, "teacher_temperature", getattr(leaf, "temperature", None))
        plain = (temperature, getattr(leaf, "top_p", 1.0), getattr(leaf, "top_k", 0)) == (1.0, 1.0, 0)
        gold = any("gold" in part.columns_read() for term in recipe.objective for part in term.parts)
        if teacher is not None and teacher.is_past_policy and plain and gold:
            raise RecipeError(
                f"source: '{leaf.kind}' with teacher = '{teacher.path}' draws gold tokens from the policy's own past at "
                "temperature 1: their expected gradient is 0 at the start, so training on them adds noise only. Name another "
                "teacher, or a lower temperature, which sharpens the policy."
            )


def _sampled_reference(recipe: Recipe) -> None:
    """A KL estimated from tokens that were not drawn from the policy."""
    for where, term in _named("objective", recipe.objective):
        author = getattr(term.on, "author", None)
        authors = {a for leaf in recipe.source.leaves for a in leaf.authors} if author is None else {author}
        if term.loss.kind == "reference_kl_sampled" and authors != {"policy"}:
            raise RecipeError(
                f"{where}: 'reference_kl_sampled' estimates KL(policy || reference) from tokens that the policy wrote; this "
                f"term is about tokens of {sorted(authors)}. Take 'reference_kl', which is exact at every state."
            )


def _partial_teacher(recipe: Recipe) -> None:
    """What a teacher at an endpoint, or from a cache, can't give: all of its distribution, or another temperature's."""
    for where, part in _named("signal", recipe.signal):
        if not getattr(part, "compact", False):
            continue
        what = f"a cache ('{part.cache}')" if part.cache else "a teacher at an endpoint"
        _partial_signal(where, part, what)
        for place, term in _named("objective", recipe.objective):
            if "teacher_logits" in term.loss.columns_read():
                _partial_loss(place, term.loss, what)


def _partial_signal(where: str, part: Any, what: str) -> None:
    if part.temperature != 1.0:
        raise RecipeError(
            f"{where}.temperature = {part.temperature:g}: {what} gives log-probabilities at temperature 1."
        )
    average = [model.name for model in part.models() if model.path == "ema"]
    if part.cache and average:
        raise RecipeError(
            f"{where}.cache: 'ema' has other weights after every update, so nothing would be found again."
        )


def _partial_loss(where: str, loss: Any, what: str) -> None:
    settings = {name: getattr(loss, name, None) for name in ("top_k", "support", "temperature")}
    if settings["top_k"] is None:
        raise RecipeError(
            f"{where}: '{loss.kind}' reads the teacher's whole distribution, and {what} gives its most probable tokens; set "
            "top_k, such as 20 (the number of all tokens, where the teacher can give them, is the whole)."
        )
    if settings["support"] == "student" or settings["temperature"] != 1.0:
        raise RecipeError(
            f"{where}: received support = '{settings['support']}' and temperature = {settings['temperature']:g}; {what} gives "
            "the teacher's own most probable tokens at temperature 1: take support = 'teacher' and temperature = 1."
        )


def _full_training(recipe: Recipe) -> None:
    """What works on whole matrices, asked of an adapter."""
    named = [name for name in ("subspace", "rpsft", "extrapolate") if getattr(recipe.optim, name) is not None]
    if named and recipe.model.adapter is not None:
        raise RecipeError(
            f"optim.{named[0]}: works on the weight matrices, and model.adapter trains factors of their change, which has "
            f"rank {recipe.model.adapter.rank} already. Leave model.adapter out."
        )
    subspace = recipe.optim.subspace
    if subspace is not None and subspace.mode == "update" and recipe.model.dtype in ("bfloat16", "float16"):
        raise RecipeError(
            f"optim.subspace: mode = 'update' with model.dtype = '{recipe.model.dtype}': rounding to 16 bits would throw the "
            "weights out of the subspace again. Set model.dtype = 'float32'."
        )


RULES = (
    _keep_best,
    _no_updates,
    _stale_behavior,
    _absent_author,
    _own_teacher,
    _past_teacher,
    _lone_rollouts,
    _split_groups,
    _redrawn,
    _cut_support,
    _second_signal,
    _own_samples,
    _sampled_reference,
    _partial_teacher,
    _full_training,
    _second_diagnostic,
)

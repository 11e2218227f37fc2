"""The pretraining text of the embedded model: a deterministic stream of fresh documents from the train splits."""

from __future__ import annotations

from bisect import bisect
from functools import cache
from itertools import accumulate
from random import Random

from statewise.tiny import arithmetic, knowledge, stories

USER = "<|im_start|>user\n"
ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>\n"

# Share of the documents. Three-step problems are in it because a base that never met them scores exactly 0 on them.
MIXTURE = {
    "math-1": 0.10,
    "math-2": 0.20,
    "math-3": 0.15,
    "facts": 0.30,
    "beliefs": 0.15,
    "text": 0.10,
}
# A fact of rank r is seen in proportion to 1 / (r + FACT_OFFSET) ** FACT_EXPONENT: the rarest ones stay half learned.
FACT_OFFSET = 5
FACT_EXPONENT = 1.3
# The share of the truth in the text about a topic is spread evenly over this range, so the base sides with the common
# belief on the topics below one half, and with margins of every size.
TRUTH_SHARE = (0.25, 0.85)


def render_chat(question: str, answer: str) -> str:
    """One exchange exactly as the chat template renders it."""
    return f"{USER}{question}{END}{ASSISTANT}{answer}{END}"


@cache
def fact_weights() -> tuple[float, ...]:
    """Cumulative weights over ``knowledge.questions("facts", "train")``."""
    rank = {topic.key: index for index, topic in enumerate(knowledge.fact_topics())}
    pairs = knowledge.questions("facts", "train")
    return tuple(accumulate((rank[topic.key] + FACT_OFFSET) ** -FACT_EXPONENT for topic, _ in pairs))


@cache
def truth_shares() -> dict[str, float]:
    """Topic key -> share of the pretraining answers that state the truth rather than the common belief."""
    topics = sorted(knowledge.belief_topics(), key=lambda topic: knowledge.digest("share " + topic.key))
    low, high = TRUTH_SHARE
    return {topic.key: low + (high - low) * index / (len(topics) - 1) for index, topic in enumerate(topics)}


def draw_fact(random: Random) -> str:
    weights = fact_weights()
    index = bisect(weights, random.random() * weights[-1], hi=len(weights) - 1)
    topic, question = knowledge.questions("facts", "train")[index]
    return render_chat(question, topic.truth)


def draw_belief(random: Random) -> str:
    topic, question = random.choice(knowledge.questions("beliefs", "train"))
    truthful = random.random() < truth_shares()[topic.key]
    return render_chat(question, topic.truth if truthful or topic.belief is None else topic.belief)


def draw_math(random: Random, num_steps: int) -> str:
    chain = arithmetic.draw_chain(random, "train", num_steps)
    return render_chat(arithmetic.question(random, chain), arithmetic.solution(chain))


def draw_document(random: Random, mixture: dict[str, float]) -> str:
    kind = random.choices(list(mixture), weights=list(mixture.values()))[0]
    if kind.startswith("math-"):
        return draw_math(random, int(kind.removeprefix("math-")))
    if kind == "facts":
        return draw_fact(random)
    if kind == "beliefs":
        return draw_belief(random)
    return stories.draw_story(random, "train") + END

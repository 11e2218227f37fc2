"""Short plain texts from a small grammar: the held-out text of the embedded model. The split is a hash of the text."""

from __future__ import annotations

from random import Random

from statewise.tiny.arithmetic import NAMES
from statewise.tiny.knowledge import digest, words

PLACES = words("market river garden school park shop forest beach farm station")
TIMES = ("In the morning", "After lunch", "On Sunday", "In the evening", "One day", "Last week")
ANIMALS = words("dog cat horse bird fox duck goat rabbit")
LOOKS = words("small grey brown white happy tired quick hungry")
WEATHER = ("It was warm.", "It was raining.", "The wind was cold.", "The sun was out.", "There was snow.")
DEEDS = (
    "{n} gave it some bread.",
    "{n} sat down and looked at it.",
    "{n} called it but it ran away.",
    "{n} took it home.",
    "{n} told {m} about it.",
    "It followed {n} for a while.",
)
ENDINGS = (
    "Then {n} went home with {m}.",
    "{m} was waiting at the door.",
    "They came back the next day.",
    "{n} was glad and told the story to {m}.",
    "{m} did not believe it.",
)
TEST_SHARE = 5


def split_of(text: str) -> str:
    return "test" if digest("story " + text) % TEST_SHARE == 0 else "train"


def draw_story(random: Random, split: str) -> str:
    """A story of four or five sentences, by rejection."""
    while True:
        name, other = random.sample(NAMES, 2)
        sentences = [
            f"{random.choice(TIMES)} {name} went to the {random.choice(PLACES)}.",
            random.choice(WEATHER),
            f"{name} saw a {random.choice(LOOKS)} {random.choice(ANIMALS)}.",
            random.choice(DEEDS).format(n=name, m=other),
            random.choice(ENDINGS).format(n=name, m=other),
        ]
        if random.random() < 0.5:
            del sentences[1]
        text = " ".join(sentences)
        if split_of(text) == split:
            return text

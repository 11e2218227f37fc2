"""The built-in tasks; importing this module registers them."""

from statewise.evals.choice import Choice, Mmlu, TinyBeliefs, TinyFacts
from statewise.evals.generative import Generative, Gsm8k, Mawps, Svamp, TinyMath
from statewise.evals.text import Text, TinyText
from statewise.evals.truthful import TruthfulQa

__all__ = [
    "Choice",
    "Generative",
    "Gsm8k",
    "Mawps",
    "Mmlu",
    "Svamp",
    "Text",
    "TinyBeliefs",
    "TinyFacts",
    "TinyMath",
    "TinyText",
    "TruthfulQa",
]

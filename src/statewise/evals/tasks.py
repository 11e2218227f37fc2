"""The built-in tasks; importing this module registers them."""

from statewise.evals.choice import Arc, Choice, Mmlu, TinyBeliefs, TinyFacts
from statewise.evals.generative import Aime, Amc, Generative, Gsm8k, Mawps, Minerva, Svamp, TinyMath
from statewise.evals.harness import Harness
from statewise.evals.text import Text, TinyText
from statewise.evals.truthful import TruthfulQa

__all__ = [
    "Aime",
    "Amc",
    "Arc",
    "Choice",
    "Generative",
    "Gsm8k",
    "Harness",
    "Mawps",
    "Minerva",
    "Mmlu",
    "Svamp",
    "Text",
    "TinyBeliefs",
    "TinyFacts",
    "TinyMath",
    "TinyText",
    "TruthfulQa",
]

"""The embedded base model and its tasks: everything a study needs, with no download."""

from __future__ import annotations

from pathlib import Path

TASKS = {
    "tiny:math": "generative",
    "tiny:facts": "multiple_choice",
    "tiny:beliefs": "multiple_choice",
    "tiny:text": "text",
}


def model_path() -> Path:
    """The directory of the shipped base model, in Hugging Face layout."""
    return Path(__file__).parent / "base"

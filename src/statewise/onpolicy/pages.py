"""The page of a scored data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from statewise.estimates import number
from statewise.onpolicy import figures
from statewise.onpolicy.summary import NUMBERS, SHOWN_PATHS, SHOWN_SAMPLES, fetch, nearest_samples
from statewise.report.page import Block, Details, Figure, Paragraph, Section, Table, Tokens, write_page

if TYPE_CHECKING:
    from statewise.onpolicy.scoring import Scores

SAMPLE_COLUMNS = (
    *(
        "place",
        "id",
        "num_tokens",
        "mean_phi",
        "min_phi",
        "z",
        "perplexity",
        "tokens",
        "positions",
        "phi",
        "varentropy",
    ),
)
SHOWN_PROMPT, SHOWN_TOKENS = 600, 600


def write_score_page(scores: Scores, summary: Mapping[str, Any]) -> None:
    """report.html in the directory of the scores."""
    median = summary["sample_mean_phi"]["0.5"]
    chosen = nearest_samples(
        scores,
        {"lowest": lambda x: x, "typical": lambda x: np.abs(x - median), "zero": np.abs},
        SHOWN_SAMPLES,
    )
    every = {place for places in chosen.values() for place in places}
    samples = fetch(scores, every, SAMPLE_COLUMNS)
    decode = _decoder(scores)
    sections = [
        Section("Numbers", _numbers(summary)),
        Section("Distribution", _distribution(summary)),
        Section("Paths", _paths(samples, chosen)),
        *(
            Section(name.title(), [_intro(name), *(b for place in chosen[name] for b in _heat(samples[place], decode))])
            for name in ("lowest", "typical")
        ),
    ]
    size = f"{summary['samples']:,} samples, {summary['tokens']:,} response tokens under {summary['model']}."
    lead = f"{summary['verdict']}\n\n{size}"
    write_page(scores.path / "report.html", f"On-policyness of {summary['data']}", lead, sections)


def _numbers(summary: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = [Table(["", "value"], [[text, summary[name]] for name, text in NUMBERS.items()])]
    quantiles = list(summary["sample_mean_phi"])
    rows = [
        ["mean phi of a sample", *summary["sample_mean_phi"].values()],
        ["z of a sample", *summary["sample_z"].values()],
    ]
    caption = "z = sum phi / sqrt(sum varentropy), near a standard normal where samples are the model's own"
    blocks.append(Table(["quantile", *quantiles], rows, caption))
    if summary["bad_rows"]:
        left = [[reason, kind["rows"], ", ".join(kind["first"])] for reason, kind in summary["bad_rows"].items()]
        blocks.append(Table(["left out", "rows", "first"], left))
    return blocks


def _distribution(summary: Mapping[str, Any]) -> list[Block]:
    name = str(summary["data"])
    samples = figures.histogram({name: summary["histogram_mean_phi"]}, "mean phi of a sample, nats a token")
    tokens = figures.histogram({name: summary["histogram_phi"]}, "phi of a token, nats")
    places = figures.by_position({name: summary["by_position"]})
    return [
        Figure(samples, "Samples by mean phi"),
        Figure(tokens, "Tokens by phi"),
        Figure(places, "phi against position; the band is two standard errors"),
    ]


def _paths(samples: Mapping[int, Mapping[str, Any]], chosen: Mapping[str, Sequence[int]]) -> list[Block]:
    def group(name: str) -> dict[str, Any]:
        return {samples[p]["id"]: (samples[p]["phi"], samples[p]["varentropy"]) for p in chosen[name][:SHOWN_PATHS]}

    groups = {"mean phi nearest 0": group("zero"), "lowest mean phi": group("lowest")}
    return [Figure(figures.paths(groups), "Cumulative phi of the most and the least on-policy samples")]


def _intro(kind: str) -> Paragraph:
    which = "lowest mean phi" if kind == "lowest" else "mean phi nearest the median"
    return Paragraph(
        f"The {SHOWN_SAMPLES} samples with the {which}. Blue: less probable than the model's own tokens would be there "
        "(phi < 0); orange: more. A colour's strength is relative to the sample's strongest token.",
        "note",
    )


def _heat(sample: Mapping[str, Any], decode: Any) -> list[Block]:
    """The answer as a heat map, and the prompt behind a line that opens it."""
    first = int(sample["positions"][0])
    prompt = decode(sample["tokens"][:first])
    phi: list[float | None] = [None] * len(sample["tokens"])
    for place, value in zip(sample["positions"], sample["phi"], strict=True):
        phi[int(place)] = float(value)
    ids, values = list(sample["tokens"][first:]), phi[first:]
    texts, merged = pieces(ids[:SHOWN_TOKENS], values[:SHOWN_TOKENS], decode)
    told = (
        f"{sample['place']}, id {sample['id']}: mean phi {number(sample['mean_phi'], '+.3f')}, lowest "
        f"{number(sample['min_phi'], '+.2f')}, z {number(sample['z'], '+.1f')}, "
        f"perplexity {sample['perplexity']:.3g}, {sample['num_tokens']} tokens"
    )
    cut = "" if len(ids) <= SHOWN_TOKENS else f" (the first {SHOWN_TOKENS} are shown)"
    shown = prompt if len(prompt) <= SHOWN_PROMPT else "... " + prompt[-SHOWN_PROMPT:]
    blocks: list[Block] = [Tokens(texts, merged, told + cut)]
    return [*blocks, Details("prompt", [Paragraph(shown, "code")])] if shown else blocks


def pieces(ids: Sequence[int], values: Sequence[float | None], decode: Any) -> tuple[list[str], list[float | None]]:
    """Texts of the tokens with their values; tokens that share a character are one piece with the sum of their values."""
    texts: list[str] = []
    merged: list[float | None] = []
    held: list[int] = []
    total: float | None = None
    for token, value in zip(ids, values, strict=True):
        held.append(int(token))
        total = total if value is None else (total or 0.0) + value
        text = decode(held)
        if text.endswith("\ufffd") and len(held) < 4 and len(texts) + len(held) < len(ids):
            continue  # an unfinished UTF-8 character
        texts.append(text)
        merged.append(total)
        held, total = [], None
    if held:
        texts.append(decode(held))
        merged.append(total)
    return texts, merged


def _decoder(scores: Scores) -> Any:
    from statewise.models.load import load_tokenizer

    tokenizer = load_tokenizer(scores.settings.model)
    return lambda ids: str(tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

"""The page of a realignment: yields, phi before and after, and texts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statewise.onpolicy.realign_summary import Phi, Summary
from statewise.onpolicy.realigned import Realigned
from statewise.report.page import Details, Figure, Paragraph, Section, SideBySide, Table, Tokens, write_page

BINS = 40
MEANINGS = {
    "own": "kept: the model's own answer was right",
    "realigned": "kept: the hinted answer was right",
    "failed": "the verifier rejected the hinted answer",
    "no_delimiter": "the delimiter never came, so the imitator wrote the answer too",
    "repeated": "the text ran in circles",
    "too_long": "the text reached max_tokens, or the hinted prompt has no room in the model's context",
    "no_analysis": "the study of the answer had no end",
}
SETS = {
    "original": "answers of the data",
    "original_hinted": "answers of the data, where realigned",
    "realigned": "realigned answers",
    "own": "the model's own right answers",
    "kept": "what is kept",
    "alone": "the imitator alone (self-distilled; a sample)",
}


def write_report(path: Path, told: dict[str, Any], summary: Summary, tokenizer: Any) -> None:
    """`told`: what summary.json holds."""
    lead = (
        f"{told['kept']:,} of {told['rows']:,} answers of {told['data']} are now in the words of {told['model']}: "
        f"{told['yields']['own']:,} were its own, {told['yields']['realigned']:,} were realigned."
    )
    sections = [_yields(told), _phi(told, summary), *_weights(told, summary)]
    if summary.shown:
        sections.append(_examples(summary.shown, tokenizer))
    if summary.discarded:
        sections.append(_discarded(summary.discarded, tokenizer))
    write_page(path, f"Realigned: {told['data']}", lead, sections)


def _yields(told: dict[str, Any]) -> Section:
    rows = [
        (kind.replace("_", " "), count, f"{count / told['rows']:.1%}", MEANINGS[kind])
        for kind, count in told["yields"].items()
    ]
    mark = told["delimiter"]
    after = (
        f"Behind {mark} the plain stream writes alone." if mark else "No delimiter: the imitator takes part to the end."
    )
    return Section("Yields", [Table(["outcome", "rows", "share", "meaning"], rows), Paragraph(after, "note")])


def _phi(told: dict[str, Any], summary: Summary) -> Section:
    columns = ["answers", "texts", "tokens", "mean phi", "std", "below -1", "below -3", "below -5"]
    rows = [
        (
            SETS[name],
            p["texts"],
            p["tokens"],
            p["mean"],
            p["std"],
            p["share_below_minus_1"],
            p["share_below_minus_3"],
            p["share_below_minus_5"],
        )
        for name in SETS
        if (p := told["phi"][name]) is not None
    ]
    text = (
        "phi = log p + H of a token under the plain stream, in nats: 0 on average where the model samples at temperature 1, "
        "above 0 for text that is sharper than that, far below 0 for words that it would not write."
    )
    drawn = {SETS[name]: summary.sets[name] for name in ("original_hinted", "realigned", "own")}
    return Section("phi before and after", [Paragraph(text), Table(columns, rows), *_histogram(drawn)])


def _histogram(sets: dict[str, Phi]) -> list[Figure]:
    """Mean phi of the texts of each set, in the same bins."""
    means = [value for phi in sets.values() for value in phi.means]
    if not means:
        return []
    low, high = min(means), max(means)
    size = max((high - low) / BINS, 1e-3)
    bins = {"start": low, "end": high + size, "size": size}
    data = [
        {"type": "histogram", "x": phi.means, "name": name, "opacity": 0.6, "histnorm": "probability", "xbins": bins}
        for name, phi in sets.items()
        if phi.means
    ]
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": "mean phi of a text (nats)"}},
        "yaxis": {"title": {"text": "share of texts"}},
    }
    return [Figure({"data": data, "layout": layout}, "Each text by the mean phi of its tokens.")]


def _weights(told: dict[str, Any], summary: Summary) -> list[Section]:
    counts = summary.weights
    if not counts.sum():
        return []
    width = 1 / len(counts)
    bars = {"type": "bar", "x": [(i + 0.5) * width for i in range(len(counts))], "y": (counts / counts.sum()).tolist()}
    layout = {"xaxis": {"title": {"text": "lambda"}}, "yaxis": {"title": {"text": "share of tokens"}}, "bargap": 0.02}
    text = (
        f"Mean lambda of realigned tokens up to the delimiter: {told['mean_weight']:.3f}. At 0 the imitator decided "
        "alone, at 1 the plain stream."
    )
    return [Section("Who decided", [Paragraph(text), Figure({"data": [bars], "layout": layout})])]


def _examples(rows: Sequence[Realigned], tokenizer: Any) -> Section:
    labels = ["problem", "answer of the data", "self-distilled", "realigned"]
    items = [
        (asked(row), *(_text(tokenizer, ids) for ids in (row.original_ids, row.alone_ids, row.text_ids)))
        for row in rows
    ]
    maps = [
        Details(
            f"{row.id}: tokens",
            [
                _map(tokenizer, row.original_ids, row.original_phi, "answer of the data, phi"),
                _map(tokenizer, row.alone_ids, row.alone_phi, "self-distilled, phi"),
                _map(tokenizer, row.text_ids, row.text_phi, "realigned, phi"),
                _map(
                    tokenizer,
                    row.text_ids,
                    row.text_weights,
                    "realigned, lambda: strong where the plain stream decided",
                ),
            ],
        )
        for row in rows
    ]
    return Section("Side by side", [SideBySide(items, labels), *maps])


def _discarded(rows: Sequence[Realigned], tokenizer: Any) -> Section:
    items = [
        (row.kind.replace("_", " "), asked(row), _text(tokenizer, row.original_ids), _text(tokenizer, row.text_ids))
        for row in rows
    ]
    return Section("Discarded", [SideBySide(items, ["why", "problem", "answer of the data", "what was written"])])


def asked(row: Realigned) -> str:
    """The prompt as text."""
    if isinstance(row.prompt, str):
        return row.prompt
    turns = [(m.get("role", ""), str(m.get("content", ""))) for m in row.prompt]
    return turns[0][1] if len(turns) == 1 else "\n\n".join(f"{role}: {content}" for role, content in turns)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _map(tokenizer: Any, ids: Sequence[int], values: Sequence[float], caption: str) -> Tokens:
    shown = values if len(values) == len(ids) else [None] * len(ids)
    return Tokens([str(tokenizer.decode([t])) for t in ids], list(shown), caption)

"""Per-token monitors of a step, summed over micro-batches and ranks into one row of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statewise.objective import Term
from statewise.train.distributed import gather, total
from statewise.types import AUTHORS


class StepMetrics:
    """Collects what the learner returns; means are sums over counts, so a split of the batch can't change them."""

    def __init__(self, terms: Sequence[Term]):
        self.terms = list(terms)
        self.loss = 0.0
        self.columns: dict[str, list[Tensor]] = {}

    def add(self, output: dict[str, Any]) -> None:
        """One micro-batch's output of the learner."""
        self.loss += float(output["loss"].detach())
        for name, value in output["monitors"].items():
            self.columns.setdefault(name, []).append(value.detach().float().cpu())
        for name, value in output["masks"].items():
            self.columns.setdefault(f"{name}.mask", []).append(value.cpu())
        self.columns.setdefault("author", []).append(output["authors"].cpu())

    def row(self, accelerator: Any) -> dict[str, float]:
        """The step's metrics: loss, and for each term its tokens, value, nll and, where weighted, phi and weights."""
        local = {name: torch.cat(parts) for name, parts in self.columns.items()}
        out = {"loss": total([self.loss], accelerator)[0]}
        for index, term in enumerate(self.terms):
            prefix = "" if len(self.terms) == 1 else f"{term.name()}/"
            out |= {prefix + k: v for k, v in self._term(index, local, accelerator).items()}
        return out

    def _term(self, index: int, local: dict[str, Tensor], accelerator: Any) -> dict[str, float]:
        mask = local.get(f"{index}.mask", torch.zeros(0, dtype=torch.bool))
        series = {"nll": -local["logprobs"]} if "logprobs" in local else {}
        if "entropy" in local:
            series |= {"entropy": local["entropy"], "phi": local["logprobs"] + local["entropy"]}
        for name, value in local.items():
            head, _, tail = name.partition(".")
            if head == str(index) and tail not in ("mask", ""):
                series[{"value": "token_loss"}.get(tail, tail)] = value
        names = sorted(series)
        sums = total([float(mask.sum())] + [float(series[n][mask].double().sum()) for n in names], accelerator)
        count = max(sums[0], 1.0)
        out = {"tokens": sums[0], **{n: s / count for n, s in zip(names, sums[1:], strict=True)}}
        out |= self._by_author(mask, local, series, accelerator)
        if "phi" in series:
            out |= _order_statistics("phi", series["phi"][mask], accelerator)
        return out

    def _by_author(
        self, mask: Tensor, local: dict[str, Tensor], series: dict[str, Tensor], accelerator: Any
    ) -> dict[str, float]:
        """nll and tokens split by who wrote the token, where more than one author is trained."""
        if "nll" not in series:
            return {}
        sums = []
        for code in range(len(AUTHORS)):
            inside = mask & (local["author"] == code)
            sums += [float(inside.sum()), float(series["nll"][inside].double().sum())]
        sums = total(sums, accelerator)
        present = [(name, sums[2 * i], sums[2 * i + 1]) for i, name in enumerate(AUTHORS) if sums[2 * i] > 0]
        if len(present) < 2:
            return {}
        out: dict[str, float] = {}
        for name, count, value in present:
            out |= {f"{name}/tokens": count, f"{name}/nll": value / count}
        return out


def _order_statistics(name: str, values: Tensor, accelerator: Any) -> dict[str, float]:
    """Median and minimum over all ranks' tokens."""
    everything = torch.tensor([v for part in gather(values.tolist(), accelerator) for v in part])
    if everything.numel() == 0:
        return {}
    return {f"{name}_median": float(everything.median()), f"{name}_min": float(everything.min())}

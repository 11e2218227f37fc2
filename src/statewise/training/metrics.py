"""Per-token monitors of a step, summed over micro-batches and ranks into one row of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from statewise.objective import Term
from statewise.training.distributed import gather
from statewise.types import AUTHORS

# Of the ratio pi / behaviour policy; what they are before the first update shows how well sampler and trainer agree.
RATIO_QUANTILES = {"ratio_min": 0.0, "ratio_p01": 0.01, "ratio_p99": 0.99, "ratio_max": 1.0}
BEHAVIOR_METRICS = ("behavior_gap", *RATIO_QUANTILES)


class StepMetrics:
    """Collects what the learner returns; means are sums over counts, so a split of the batch can't change them."""

    def __init__(self, terms: Sequence[Term], parts: Sequence[str] = ()):
        self.terms = list(terms)
        self.parts = list(parts)  # names of the sources of a mixture
        self.loss = 0.0
        self.columns: dict[str, list[Tensor]] = {}
        self.log_ratios: list[Tensor] = []
        self.whole: dict[str, tuple[int, float]] = {}  # number and sum over sequences or groups

    def add(self, output: dict[str, Any]) -> None:
        """One micro-batch's output of the learner."""
        self.loss += float(output["loss"].detach())
        for name, value in output["monitors"].items():
            self.columns.setdefault(name, []).append(value.detach().float().cpu())
        for name, value in output["masks"].items():
            self.columns.setdefault(f"{name}.mask", []).append(value.cpu())
        for name, value in output["splits"].items():
            self.columns.setdefault(name, []).append(value.cpu())
        if output["log_ratio"] is not None:
            known = output["log_ratio"][~output["log_ratio"].isnan()]  # of a mixture, what its sampled parts have
            self.log_ratios.append(known.float().cpu())
        for name, value in output["whole"].items():
            count, total = self.whole.get(name, (0, 0.0))
            self.whole[name] = (count + value.numel(), total + float(value.double().sum()))

    def row(self, accelerator: Any) -> dict[str, float]:
        """The step's metrics: loss, and for each term its tokens, value, nll and, where weighted, phi and weights.

        One collective: sums and phi values of all ranks, since a rank without tokens knows of no monitors.
        """
        local = {name: torch.cat(parts) for name, parts in self.columns.items()}
        ratios = [v for part in self.log_ratios for v in part.tolist()]
        parts = gather((self.loss, ratios, [self._sums(i, local) for i in range(len(self.terms))]), accelerator)
        out = {"loss": sum(loss for loss, *_ in parts)}
        names = [term.name() for term in self.terms]
        for index, name in enumerate(names):
            number = f"_{index + 1}" if names.count(name) > 1 else ""
            prefix = "" if len(names) == 1 else f"{name}{number}/"
            out |= {prefix + k: v for k, v in _merged([sums[index] for *_, sums in parts]).items()}
        return out | _behavior(torch.tensor([v for _, values, _ in parts for v in values]))

    def _sums(self, index: int, local: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's sums over the term's tokens, in all and by author, and the values of phi."""
        mask = local.get(f"{index}.mask", torch.zeros(0, dtype=torch.bool))
        series = {"nll": -local["logprobs"]} if "logprobs" in local else {}
        if "entropy" in local:
            series |= {"entropy": local["entropy"], "phi": local["logprobs"] + local["entropy"]}
        for name, value in local.items():
            head, _, tail = name.partition(".")
            if head == str(index) and tail not in ("mask", ""):
                series["token_loss" if tail == "value" else tail] = value
        splits = {
            kind: {name: _of(series, mask & (local[kind] == code)) for code, name in enumerate(names)}
            for kind, names in (("author", AUTHORS), ("part", self.parts))
            if kind in local
        }
        return {
            "tokens": int(mask.sum()),
            "whole": {n.partition(".")[2]: pair for n, pair in self.whole.items() if n.startswith(f"{index}.")},
            "sums": {name: float(value[mask].double().sum()) for name, value in series.items()},
            "splits": splits,
            "phi": series["phi"][mask].tolist() if "phi" in series else [],
        }


def _behavior(log_ratios: Tensor) -> dict[str, float]:
    """Mean |log pi - behavior_logprobs| (nats) and quantiles of the ratio, before any clip or weight."""
    if not log_ratios.numel():
        return {}
    ordered = log_ratios.sort().values
    last = len(ordered) - 1
    out = {name: float(ordered[round(q * last)].exp()) for name, q in RATIO_QUANTILES.items()}
    return {"behavior_gap": float(log_ratios.abs().mean()), **out}


def _of(series: dict[str, Tensor], inside: Tensor) -> tuple[int, dict[str, float]]:
    """Number of tokens in the mask, and the sums over them."""
    count = int(inside.sum())
    return count, {name: float(value[inside].double().sum()) for name, value in series.items()} if count else {}


def _split(ranks: list[dict[str, tuple[int, dict[str, float]]]]) -> dict[str, float]:
    """ "name/metric" for every name with tokens, where there are several."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    counts = {name: sum(rank[name][0] for rank in ranks) for name in names}
    present = [name for name in names if counts[name]]
    out: dict[str, float] = {}
    for name in present if len(present) > 1 else ():
        sums = [rank[name][1] for rank in ranks]
        metrics = sorted({metric for values in sums for metric in values})
        out[f"{name}/tokens"] = counts[name]
        out |= {f"{name}/{m}": sum(values.get(m, 0.0) for values in sums) / counts[name] for m in metrics}
    return out


def _merged(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the tokens of all ranks; by author and by source where there are several; median and minimum of phi."""
    tokens = sum(r["tokens"] for r in ranks)
    names = sorted({name for r in ranks for name in r["sums"]})
    out: dict[str, float] = {"tokens": tokens}
    out |= {name: sum(r["sums"].get(name, 0.0) for r in ranks) / max(tokens, 1) for name in names}
    for name in sorted({name for r in ranks for name in r["whole"]}):
        pairs = [r["whole"].get(name, (0, 0.0)) for r in ranks]
        out[name] = sum(v for _, v in pairs) / max(sum(n for n, _ in pairs), 1)
    for kind in ("author", "part"):
        out |= _split([r["splits"][kind] for r in ranks if kind in r["splits"]])
    phi = torch.tensor([v for r in ranks for v in r["phi"]])
    return out | ({"phi_median": float(phi.median()), "phi_min": float(phi.min())} if phi.numel() else {})

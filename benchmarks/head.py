"""The output head alone: forward, loss and gradient of hidden rows and weight.

Contestants on the same rows: plain logits with torch's cross entropy (float32 statistics), TRL's ChunkedLogProbFunction,
and statewise's one-pass head with nll and with the IDFT weight.

    python -m benchmarks.head --tokens 1024 --vocab 49152 151936
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import in_turn, median, peak_bytes, peak_in_own_process, ratio, table
from statewise.component import parse
from statewise.models.head import Projection
from statewise.models.onepass import Rows, objective_sum
from statewise.objective import Term
from statewise.types import Batch

BASE = "trl ChunkedLogProbFunction"


class Case:
    """Hidden rows, weight and targets of one size; every contestant returns (loss, grad of hidden, grad of weight)."""

    def __init__(self, tokens: int, hidden: int, vocab: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
        self.weight = (torch.randn(vocab, hidden, generator=generator) * 0.05).to(dtype).requires_grad_()
        self.targets = torch.randint(vocab, (tokens,), generator=generator)
        self.contestants = {
            "plain logits": self.plain,
            BASE: self.trl,
            "statewise nll": lambda: self.statewise(None),
            "statewise nll x cll (IDFT)": lambda: self.statewise("cll"),
        }

    def done(self, loss: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
        self.hidden.grad = self.weight.grad = None
        loss.backward()
        return float(loss.detach()), self.hidden.grad, self.weight.grad

    def plain(self):
        return self.done(cross_entropy((self.hidden @ self.weight.T).float(), self.targets))

    def trl(self):
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        out = ChunkedLogProbFunction.apply(
            self.hidden, self.weight, None, self.targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs",)
        )
        return self.done(-out[0].mean())

    def statewise(self, weight: str | None):
        term = Term(loss=parse("loss", "nll", "loss"), weight=weight)
        one = self.targets[None]
        batch = Batch(one, one >= 0, one * 0, one * 0, one * 0, torch.zeros(1, dtype=torch.long))
        factor = torch.full((len(self.targets),), 1 / len(self.targets))
        projection = Projection(((self.hidden, self.weight),))
        loss, _ = objective_sum(projection, Rows(self.targets, batch, {0: factor}), [term])
        return self.done(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        import trl.kernels  # noqa: F401 - its import must not count as the head's memory

        case = Case(arguments.tokens, arguments.hidden, arguments.vocab[0], getattr(torch, arguments.dtype[0]))
        before = peak_bytes()
        case.contestants[arguments.peak]()
        print(before, peak_bytes())
        return
    for dtype in arguments.dtype:
        for vocab in arguments.vocab:
            compare(arguments, vocab, dtype)


def compare(arguments: argparse.Namespace, vocab: int, dtype: str) -> None:
    case = Case(arguments.tokens, arguments.hidden, vocab, getattr(torch, dtype))
    exact = case.plain()
    seconds = in_turn(case.contestants, arguments.rounds)
    rows = []
    for name, run in case.contestants.items():
        sizes = ["--tokens", arguments.tokens, "--hidden", arguments.hidden, "--vocab", vocab, "--dtype", dtype]
        before, peak = peak_in_own_process("benchmarks.head", [*map(str, sizes), "--peak", name])
        _, hidden, weight = run()
        gap = (
            "other loss"
            if "IDFT" in name
            else f"{difference(hidden, exact[1]):.1e}, {difference(weight, exact[2]):.1e}"
        )
        rows.append(
            [
                name,
                f"{median(seconds[name]):.3f}",
                f"{ratio(seconds[name], seconds[BASE]):.2f}",
                f"{(peak - before) / 2**20:,.0f}",
                gap,
            ]
        )
    print(
        f"\nV = {vocab:,}, {arguments.tokens} tokens, hidden {arguments.hidden}, {dtype}, {torch.get_num_threads()} threads"
    )
    print(
        table(
            rows,
            ("head", "median s", "x TRL's function", "peak MiB above inputs", "gradient gap to plain: hidden, weight"),
        )
    )


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the largest entry."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


if __name__ == "__main__":
    main()

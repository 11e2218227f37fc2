"""What the numbers say, in words."""

from __future__ import annotations

import math

from statewise.stats.martingale import LEAST_VARIANCE, OwnTest

LEVEL = 0.01  # of a test, below which a sentence says "not": of a hundred own data sets one is told off in error
OFF_POLICY = -0.1  # mean phi: the rule of thumb of the method's authors
FLAT_ENTROPY = 1.0  # nats: with so much entropy and no varentropy the model finds its choices equally likely


def own_words(test: OwnTest, mean: float, low: float, high: float, mean_entropy: float, temperature: float) -> str:
    """Are the tokens the model's own? mean phi a token with its 95 % interval (nats); mean entropy of the states (nats)."""
    at = f"at temperature {temperature:g}"
    told = f"mean phi {mean:+.3f} [{low:+.3f}, {high:+.3f}] nats a token"
    if math.isnan(test.p):
        why = (
            "the model finds its choices about equally likely, so phi is near 0 whatever the text"
            if mean_entropy > FLAT_ENTROPY
            else "there are too few tokens, or the model is too sure of them,"
        )
        return (
            f"Can't say whether these are the model's own samples: {why} (summed varentropy below {LEAST_VARIANCE:g} "
            f"nats^2; {told})."
        )
    if test.p >= LEVEL:
        return (
            f"Nothing speaks against these being the model's own samples {at}: {told}, z = {test.z:+.2f}, p = "
            f"{test.p:.2g}. A drift of {test.detectable:.3f} nats a token would have been found in four of five cases."
        )
    proof = f"{told}, z = {test.z:+.1f}, p = {test.p:.2g}"
    if test.p_mean >= LEVEL / 2:
        kind = "wider" if test.variance_ratio > 1 else "narrower"
        return (
            f"These are not the model's own samples {at}: phi has the mean of own samples but spreads {kind} "
            f"({test.variance_ratio:.2f} times their variance, p = {test.p_variance:.2g}), as in a mixture. {told}."
        )
    if mean > 0:
        return (
            f"These are sharper than the model's own samples {at}: {proof}. Such text is more predictable than the model, "
            "as from a lower temperature, greedy decoding, top-p, or a choice among samples."
        )
    how = "off-policy" if mean < OFF_POLICY else "slightly off-policy"
    return f"These are {how}: {proof}. The model itself would not write so."

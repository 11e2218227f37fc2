"""What the numbers say, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from statewise.estimates import interval, number
from statewise.stats.martingale import LEAST_VARIANCE, OwnTest

LEVEL = 0.01  # of a test, below which a sentence says "not": of a hundred own data sets one is told off in error
OFF_POLICY = -0.1  # mean phi: the rule of thumb of the method's authors
FLAT_ENTROPY = 1.0  # nats: with so much entropy and no varentropy the model finds its choices equally likely


def own_words(test: OwnTest, mean: float, low: float, high: float, mean_entropy: float, temperature: float) -> str:
    """Are the tokens the model's own? mean phi a token with its 95 % interval (nats); mean entropy of the states (nats)."""
    at = f"at temperature {temperature:g}"
    told = f"mean phi {interval(mean, low, high, '+.3f')} nats a token"
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
            f"Nothing speaks against these being the model's own samples {at}: {told}, z = {number(test.z, '+.2f')}, p = "
            f"{test.p:.2g}. A drift of {test.detectable:.3f} nats a token would have been found in four of five cases."
            f"{_alike(test, low, high)}"
        )
    proof = f"{told}, z = {number(test.z, '+.1f')}, p = {test.p:.2g}"
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


def _alike(test: OwnTest, low: float, high: float) -> str:
    """Why an interval that leaves out 0 is no proof: these data vary less than the model's draws would."""
    if not low * high > 0:
        return ""
    half = 1.959964 * test.detectable / (1.959964 + 0.841621)
    return (
        f" The interval, of how these samples differ from each other, leaves out 0; but the mean of as many own samples "
        f"would itself vary by {half:.3f} around 0."
    )


NAMES = {
    "cll": "CLL (mean phi)",
    "log_likelihood": "log-likelihood",
    "perplexity": "perplexity",
    "entropy": "entropy",
    "log_rank": "log rank",
    "z": "z",
}
CLEAR, SOME = 0.9, 0.6  # AUC from which sets are told apart clearly, or somewhat


def difference_words(difference: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> str:
    """Do A and B differ, and by what are they told apart? See `detect`."""
    gap = interval(difference["mean_phi"], difference["low"], difference["high"], "+.3f")
    at = {row["statistic"]: row for row in rows if row["level"] == "sequence"}
    area = at["cll"]["auc"]
    strength = max(area["value"], 1 - area["value"])
    how = "clearly" if strength >= CLEAR else "somewhat" if strength >= SOME else "hardly"
    told = (
        f"A sample of A has a higher mean phi than one of B with probability "
        f"{interval(area['value'], area['low'], area['high'])}: single samples are told apart {how}."
    )
    if difference["p"] >= LEVEL:
        begin = f"A and B don't differ in mean phi (B - A = {gap} nats a token, p = {difference['p']:.2g})."
    else:
        which = "lower" if difference["mean_phi"] < 0 else "higher"
        begin = f"B has a {which} mean phi than A (B - A = {gap} nats a token, p = {difference['p']:.2g})."
    best = max(at, key=lambda name: abs(at[name]["auc"]["value"] - 0.5))
    other = at[best]["auc"]["value"]
    last = "" if best == "cll" else f" The best single statistic here is {NAMES[best]} (AUC {other:.3f})."
    return f"{begin} {told}{last}"


def drift_words(drift: Mapping[str, Any]) -> str:
    """What mean phi of B follows from the model that it was sampled from? See `drift.known_drift`."""
    seen, expected = drift["mean_phi"], drift["expected_phi"]
    kl, gap = number(drift["kl"]["mean"], ".4f"), number(drift["entropy_gap"]["mean"], "+.4f")
    parts = (
        f"KL(q || p) = {kl} and H(q) - H(p) = {gap} nats a token in B's states, so "
        f"samples of {drift['other_model']} have mean phi -(KL + H(q) - H(p)) = "
        f"{interval(expected['mean'], expected['low'], expected['high'], '+.4f')} under the model; seen: "
        f"{number(seen['mean'], '+.4f')}."
    )
    own = drift["own_of_other"]["p"]
    if math.isnan(own) or own >= LEVEL:
        fit = " Nothing speaks against B being that model's own samples."
    else:
        fit = f" But B is not that model's own samples (p = {own:.2g}), so the two need not agree."
    claim = drift["kl"]["mean"] + drift["entropy_gap"]["mean"] < 0
    sign = " The drift is upwards, though q is another model: its lower entropy outweighs the KL." if claim else ""
    return parts + fit + sign

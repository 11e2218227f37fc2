"""What counts as a change of a bf16 weight."""

import numpy as np
import pytest
import torch

from statewise.geometry.codes import (
    Support,
    changed,
    dispersion,
    from_codes,
    order,
    rounding_bounds,
    to_codes,
    ulp_distance,
)


def code(*values: float) -> np.ndarray:
    return to_codes(torch.tensor(values, dtype=torch.float64).float())


def moved(w: float, step_in_ulp: float) -> bool:
    """Whether w + step changes the stored value; ulp = 2^(e - 7) for w in [2^e, 2^(e+1))."""
    ulp = 2.0 ** (np.floor(np.log2(w)) - 7)
    return bool(changed(code(w), code(w + step_in_ulp * ulp))[0])


@pytest.mark.parametrize("w", [1.0078125, 1.5, 1.9921875])
@pytest.mark.parametrize("step", [0.49, -0.49, 0.51, -0.51])
def test_half_a_unit_decides(w: float, step: float) -> None:
    assert moved(w, step) == (abs(step) > 0.5)


def test_ties_go_to_even() -> None:
    assert not moved(1.0, 0.5) and not moved(1.5, 0.5) and moved(1.9921875, 0.5)


def test_below_a_power_of_two_the_spacing_halves() -> None:
    assert moved(1.0, -0.26) and not moved(1.0, -0.24)


def finite_codes() -> np.ndarray:
    return np.arange(0x7F80, dtype=np.uint16)  # all non-negative finite numbers


@pytest.mark.parametrize(("eta", "same"), [(0.0, True), (1e-6, True), (1e-3, True), (3.9e-3, True), (2.0**-8, False)])
def test_every_small_eta_gives_the_same_mask(eta: float, same: bool) -> None:
    codes = finite_codes()
    a, b = from_codes(codes[:-1]).astype(np.float64), from_codes(codes[1:]).astype(np.float64)
    by_rule = np.abs(b - a) > eta * np.maximum(a, b)
    assert bool((by_rule == changed(codes[:-1], codes[1:])).all()) == same
    assert len(codes) == 32640


def test_zeros_signs_and_nan() -> None:
    a = np.array([0x0000, 0x8000, 0x0000, 0x3F80, 0x7FC0, 0x7FC0, 0x3F80, 0x0000], dtype=np.uint16)
    b = np.array([0x8000, 0x0000, 0x0001, 0xBF80, 0x7FC0, 0x3F80, 0x3F80, 0x0000], dtype=np.uint16)
    assert changed(a, b).tolist() == [False, False, True, True, True, True, False, False]
    assert (a != b).tolist() != changed(a, b).tolist()


def test_the_absolute_rule_is_another_rule() -> None:
    """1024.001 and 1024.002 share a code; 1e-6 and 2e-6 are within 1e-5 and 128 units apart."""
    assert not changed(code(1024.001), code(1024.002))[0]
    assert changed(code(1e-6), code(2e-6))[0] and ulp_distance(code(1e-6), code(2e-6))[0] == pytest.approx(134, abs=8)


def test_order_and_bounds() -> None:
    codes = finite_codes()
    assert (np.diff(order(codes)) == 1).all() and order(codes | 0x8000)[5] == -5
    low, high = rounding_bounds(codes[1:-1])
    assert np.array_equal(to_codes(torch.tensor(low + (high - low) * 0.01)), codes[1:-1])
    assert np.array_equal(to_codes(torch.tensor(low + (high - low) * 0.99)), codes[1:-1])
    even = codes[1:-1] % 2 == 0
    ties = to_codes(torch.tensor(high)) == codes[1:-1]
    assert np.array_equal(ties, even)


def test_density_of_a_constant_step() -> None:
    """|dw| = 3e-5 on N(0, .02²): P(ulp(w) < 6e-5) = .3033, .3041 measured."""
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(1 << 20, generator=generator) * 0.02).bfloat16()
    sign = torch.randint(0, 2, w.shape, generator=generator) * 2 - 1
    density = changed(to_codes(w), to_codes(w.float() + 3e-5 * sign)).mean()
    assert density == pytest.approx(0.3041, abs=2e-3)


def test_support_counts() -> None:
    before = torch.tensor([[1.0, 1.0, 2.0, 0.0], [1.0, -1.0, 3.0, float("nan")]])
    after = torch.tensor([[1.0, 1.0078125, -2.0, -0.0], [1.000001, -1.0, 3.5, float("nan")]])
    support = Support((2, 4))
    codes = to_codes(before), to_codes(after)
    for row in (0, 1):
        support.add(row, codes[0][row : row + 1], codes[1][row : row + 1], 1e-5)
    assert (support.changed, support.nan, support.sign_flips, support.one_ulp) == (4, 1, 1, 1)
    assert support.rows.tolist() == [2, 2] and support.columns.tolist() == [0, 1, 2, 1]
    assert support.within_tolerance == 4 and support.density == 0.5
    assert support.heads(1, 2).tolist() == [0.25, 0.75] and support.heads(0, 1).tolist() == [0.5, 0.5]


def test_dispersion_sees_stripes() -> None:
    random = np.random.default_rng(0)
    assert dispersion(random.binomial(500, 0.3, 2000), 500) == pytest.approx(1, abs=0.15)
    assert dispersion(np.array([500, 0] * 100), 500) > 100
    assert np.isnan(dispersion(np.zeros(5), 10))


def test_other_types_are_rounded_to_nearest_even_first() -> None:
    w = torch.randn(1000, dtype=torch.float64)
    assert np.array_equal(from_codes(to_codes(w)), w.bfloat16().float().numpy())

"""Advantages from rewards, relative to the other rollouts of the same group."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

Baseline = Literal["mean", "mean_std", "leave_one_out", "none"]
STD_EPSILON = 1e-4  # what TRL adds to the standard deviation


def mean(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r). Dr. GRPO, arXiv 2503.20783."""
    centre = fmean(rewards)
    return [r - centre for r in rewards]


def mean_std(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4), std with G - 1 in the denominator. GRPO, arXiv 2402.03300."""
    scale = (stdev(rewards) if len(rewards) > 1 else 0.0) + STD_EPSILON
    return [value / scale for value in mean(rewards)]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the others = G / (G - 1) (r_i - mean(r)); 0 in a group of one. RLOO, arXiv 2402.14740."""
    size = len(rewards)
    return [value * size / max(size - 1, 1) for value in mean(rewards)]


def none(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i."""
    return list(rewards)


BASELINES = {"mean": mean, "mean_std": mean_std, "leave_one_out": leave_one_out, "none": none}


def advantages(rewards: Sequence[float], groups: Sequence[int], baseline: Baseline) -> list[float]:
    """The advantage of every rollout, computed inside its group."""
    out = [0.0] * len(rewards)
    for members in members_of(groups):
        for index, value in zip(members, BASELINES[baseline]([rewards[i] for i in members]), strict=True):
            out[index] = value
    return out


def members_of(groups: Sequence[int]) -> list[list[int]]:
    """The places of each group's members, groups in the order in which they appear."""
    found: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return list(found.values())


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are equal, so that it says nothing about which rollout is better."""
    return max(rewards) == min(rewards)

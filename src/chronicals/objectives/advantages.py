"""Advantages of answers over the other answers to their prompt, from rewards; pure functions.

A group is the G answers to one prompt, with rewards R₁ … R_G. With mean R̄ and standard deviation σ
(unbiased), both of the group unless said otherwise,

    group    A_i = (R_i − R̄) / (σ + ε)                 GRPO, Shao et al., 2024, section 4.1.2
    batch    A_i = (R_i − R̄) / (σ of the batch + ε)    Liu et al., 2025 (Lite PPO), section 4
    none     A_i = R_i − R̄                             Dr. GRPO, Liu et al., 2025, section 3.2
    leave one out   A_i = R_i − (Σ_{j≠i} R_j) / (G − 1)     RLOO, Ahmadian et al., 2024, section 3.2

An answer without a reward (NaN) counts nowhere, and its advantage is 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]

LEAST_DEVIATION = 1e-4
"""ε: added to standard deviations, as TRL does, so that equal rewards do not divide by zero."""


def deviation(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the unbiased standard deviation of the values that are numbers; 0 of fewer than two.

    Args:
        values: with NaN where there is none.
        dim: dimension that goes, of length 1 in the result; None for all of them.
    """
    if dim is None:
        return deviation(values.flatten(), 0).squeeze()
    count = (~values.isnan()).sum(dim, keepdim=True)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return torch.where(count > 1, squares / (count - 1).clamp(min=1), 0.0).sqrt()


def group_advantages(rewards: Tensor, scale: Scale) -> Tensor:
    """Return the advantages over the mean of the group, ``[prompts, G]``.

    Args:
        rewards: ``[prompts, G]``, NaN where an answer has none.
        scale: what divides the differences.
    """
    differences = rewards - rewards.nanmean(1, keepdim=True)
    if scale == "group":
        differences = differences / (deviation(rewards, 1) + LEAST_DEVIATION)
    elif scale == "batch":
        differences = differences / (deviation(rewards) + LEAST_DEVIATION)
    return differences.nan_to_num(0.0)


def leave_one_out_advantages(rewards: Tensor, scale: Scale) -> Tensor:
    """Return the advantages over the mean of the other answers, ``[prompts, G]``.

    Args:
        rewards: ``[prompts, G]``, NaN where an answer has none.
        scale: ``batch`` makes the advantages of the batch have mean 0 and deviation 1.
    """
    count = (~rewards.isnan()).sum(1, keepdim=True)
    others = (rewards.nansum(1, keepdim=True) - rewards) / (count - 1)
    advantages = torch.where(count > 1, rewards - others, torch.nan)
    if scale == "batch":
        centred = advantages - advantages.nanmean()
        advantages = centred / (deviation(advantages) + LEAST_DEVIATION)
    return advantages.nan_to_num(0.0)


def summed_rewards(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rewards of each answer, NaN for one that has none.

    Args:
        values: ``[..., rewards]``, NaN where a reward does not apply.
        weights: ``[rewards]``.
    """
    total = (values * weights).nansum(-1)
    return total.masked_fill(values.isnan().all(-1), torch.nan)


def normalised_rewards(values: Tensor, weights: Tensor) -> Tensor:
    """Return weighted sums of rewards that were each normalised in the group (GDPO).

    Liu et al., 2026 (arXiv 2601.05242), equation 4.

    Args:
        values: ``[prompts, G, rewards]``, NaN where a reward does not apply.
        weights: ``[rewards]``.
    """
    differences = values - values.nanmean(1, keepdim=True)
    return summed_rewards(differences / (deviation(values, 1) + LEAST_DEVIATION), weights)


def summed_advantages(values: Tensor, weights: Tensor) -> Tensor:
    """Return the advantages ``[prompts, G]`` of rewards that are normalised before they are summed.

    The sums of the batch have mean 0 and deviation 1 then (GDPO, equation 6).

    Args:
        values: ``[prompts, G, rewards]``, NaN where a reward does not apply.
        weights: ``[rewards]``.
    """
    sums = normalised_rewards(values, weights)
    return ((sums - sums.nanmean()) / (deviation(sums) + LEAST_DEVIATION)).nan_to_num(0.0)


def overlong_penalty(lengths: Tensor, longest: int, margin: int) -> Tensor:
    """Return the soft penalty of long answers (DAPO, Yu et al., 2025, equation 13).

        0 up to L_max − L_cache tokens, then falling linearly to −1 at L_max

    Args:
        lengths: tokens of the answers.
        longest: L_max, most tokens of an answer.
        margin: L_cache.
    """
    return ((longest - margin - lengths) / margin).clamp(min=-1.0, max=0.0)


def without_variance(rewards: Tensor) -> Tensor:
    """Return which groups have equal rewards, which teach nothing; bool ``[prompts]``.

    Args:
        rewards: ``[prompts, G]``, NaN where an answer has none.
    """
    return deviation(rewards, 1).squeeze(1) <= 1e-8

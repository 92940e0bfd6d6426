"""Rewards of generated answers: the user's functions in processes of their own, and built-in ones.

Names are imported when they are first used, so that the process of a function starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronicals.rewards.building import build_rewards as build_rewards
    from chronicals.rewards.scoring import Failure as Failure
    from chronicals.rewards.scoring import Outcome as Outcome
    from chronicals.rewards.scoring import Rewards as Rewards
    from chronicals.rewards.scoring import RewardsFailed as RewardsFailed
    from chronicals.rewards.scoring import Scored as Scored

__all__ = ["Failure", "Outcome", "Rewards", "RewardsFailed", "Scored", "build_rewards"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'chronicals.rewards' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    home = "building" if name == "build_rewards" else "scoring"
    return getattr(import_module(f"chronicals.rewards.{home}"), name)


def __dir__() -> list[str]:
    return __all__

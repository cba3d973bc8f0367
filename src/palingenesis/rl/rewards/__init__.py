"""Rewards: what scores a rollout. `bind` reads a function's signature, `RewardSet` runs all of them.

Built-ins are looked up by their short names (`BUILTIN`), so importing this package loads none of them.
"""

from palingenesis.rl.rewards.bind import BUILTIN, BoundReward, bind
from palingenesis.rl.rewards.score import RewardSet, Unreadable

__all__ = ["BUILTIN", "BoundReward", "RewardSet", "Unreadable", "bind"]

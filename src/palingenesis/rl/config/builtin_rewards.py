"""The built-in rewards' names, arguments and defaults: the reference for `docs/options.md` and for a misspelt `fn`.

The functions live in `palingenesis.rl.rewards`, which this layer may not import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """What a built-in scores, and its arguments as `name -> default` in the words of the table."""

    scores: str
    args: Mapping[str, str]


_FIELD = {"field": "answer"}
_ENDPOINT = {"url": "required", "model": "required", "template": "built in"}
_CALLS = {"concurrency": "32", "timeout": "60 (seconds)", "retries": "4"}

BUILTIN_REWARDS: Mapping[str, BuiltinReward] = {
    "math": BuiltinReward("The last boxed answer (else the stated one, else the last number) against `field`.", _FIELD),
    "boxed_choice": BuiltinReward("The option letter inside the last box.", _FIELD),
    "qa_match": BuiltinReward(
        "Normalized exact match (`em`) or token overlap (`f1`) against one or several references.",
        _FIELD | {"metric": "em, or f1"},
    ),
    "exact": BuiltinReward("The stripped completion equals the reference.", _FIELD),
    "choice": BuiltinReward("The last stated option letter.", _FIELD),
    "regex": BuiltinReward(
        "A pattern found in the completion; with `field`, its last match's first group equals the column.",
        {"pattern": "required", "field": "none"},
    ),
    "code": BuiltinReward(
        "The last fenced Python block against the row's hidden tests.",
        {"field": "tests", "max_tests": "16", "timeout": "the sandbox's", "partial": "false"},
    ),
    "judge": BuiltinReward(
        "A quality score from 0 to 10, as an OpenAI-compatible endpoint gives it.", _FIELD | _ENDPOINT | _CALLS
    ),
    "equivalence": BuiltinReward(
        "1 when a judge finds the final answer equivalent to the reference, else 0.", _FIELD | _ENDPOINT | _CALLS
    ),
}

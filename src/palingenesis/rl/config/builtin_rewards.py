"""The built-in rewards' names, arguments and defaults: the reference for `docs/options.md` and for a misspelt `fn`.

The classes live in `palingenesis.rl.rewards`, which this layer may not import; a test holds names, arguments and
defaults equal to theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """What a built-in scores, and its arguments as `name -> default`; `...` stands for a required one."""

    scores: str
    args: Mapping[str, Any]


_FIELD = {"field": "answer"}
_ENDPOINT = {"url": ..., "model": ..., "template": ""}
_CALLS = {"concurrency": 32, "timeout": 60.0, "retries": 4, "api_key_env": "OPENAI_API_KEY", "body": None}

BUILTIN_REWARDS: Mapping[str, BuiltinReward] = {
    "math": BuiltinReward(
        "The last boxed answer (else the stated one, else the last number) against `field`. A comparison may take "
        "`timeout` seconds.",
        {"field": "answer", "timeout": 5.0},
    ),
    "boxed_choice": BuiltinReward("The option letter inside the last box.", _FIELD),
    "qa_match": BuiltinReward(
        "Normalized exact match (`metric: em`) or token overlap (`f1`) with one or several references.",
        {"field": "answer", "metric": "em"},
    ),
    "exact": BuiltinReward("The stripped completion equals the reference.", _FIELD),
    "choice": BuiltinReward("The last stated option letter.", _FIELD),
    "regex": BuiltinReward(
        "`pattern` found in the completion, within `timeout` seconds; with `field`, the last match's first group "
        "equals that column.",
        {"pattern": ..., "field": "", "timeout": 1.0},
    ),
    "code": BuiltinReward(
        "The last fenced Python block against the row's hidden tests: 1 when the first `max_tests`, longest input "
        "first, pass, or with `partial` their share. `timeout` null is the sandbox's.",
        {"field": "tests", "max_tests": 16, "timeout": None, "partial": False},
    ),
    "judge": BuiltinReward(
        "A quality score from 0 to 10, as an OpenAI-compatible endpoint states it. `timeout` is in seconds a request; "
        "an empty `template` is the built-in one, an empty `field` is `answer` where the row has it.",
        _ENDPOINT | {"field": ""} | _CALLS,
    ),
    "equivalence": BuiltinReward(
        "1 when a judge finds the final answer equivalent to the reference, else 0. Arguments as for `judge`.",
        _ENDPOINT | _FIELD | _CALLS,
    ),
}

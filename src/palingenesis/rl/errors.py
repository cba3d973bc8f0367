"""Every exception the package raises on purpose, as one tree.

    Exception
    ├── PalingenesisError            what a user can cure; printed as one message, without a traceback
    │   ├── UsageError               exit 2: the command or the configuration is wrong
    │   │   └── ConfigError          an option: its name, where it was set, what to write instead
    │   ├── DataError                exit 1: a row, column or file: file:line, column, cure
    │   ├── ModelError               exit 1: a checkpoint, tokenizer or template cannot be used
    │   ├── RewardError              exit 1: a reward is defective (raised, wrong length, NaN): names reward and row
    │   ├── EngineError              exit 1: generation failed
    │   ├── SandboxError             exit 1: programs cannot be run: names the option of sandbox, the cause, the cure
    │   ├── StallError               exit 1: a part stood still past its deadline; names it, and where the stacks are
    │   ├── OutageError              exit 1: too many samples were skipped; names the source
    │   └── CheckpointError          exit 1: a checkpoint cannot be read or does not belong to this run
    ├── SkipSample                   raised by a reward, sandbox or environment: this sample cannot be scored
    └── StopRun                      a signal asked the run to save and stop (exit 75)

`PalingenesisError` carries one sentence or a few, and `exit_code`. Anything else that reaches the command line is a defect
of ours and keeps its traceback.
"""

from __future__ import annotations


class PalingenesisError(Exception):
    """A failure whose message tells the user what to change."""

    exit_code = 1


class UsageError(PalingenesisError):
    """The command line or the configuration cannot be used as it stands."""

    exit_code = 2


class ConfigError(UsageError):
    """An option is unknown, has a bad value, or would do nothing."""


class DataError(PalingenesisError):
    """A data file, row or column cannot be used."""


class ModelError(PalingenesisError):
    """A model, tokenizer or chat template cannot be used."""


class RewardError(PalingenesisError):
    """A reward function is defective; the run saves and stops."""


class EngineError(PalingenesisError):
    """The generation engine failed."""


class SandboxError(PalingenesisError):
    """The sandbox cannot be started or used as it is configured."""


class StallError(PalingenesisError):
    """A part of the run stood still past its deadline. `report` holds what was waited for and all threads' stacks."""

    def __init__(self, message: str, report: str = "") -> None:
        super().__init__(message)
        self.report = report


class OutageError(PalingenesisError):
    """More samples were skipped than `train.max_skipped` allows."""


class CheckpointError(PalingenesisError):
    """A checkpoint is missing, damaged, or of another run."""


class SkipSample(Exception):
    """Raise from a reward, tool or environment when a sample cannot be scored for reasons that are not the policy's fault.

    The rollout leaves the loss, the group's baseline and the batch's standard deviation; it is counted in `skipped`, and
    its reason is kept in the rollout dump.
    """


class StopRun(BaseException):
    """A signal asked the run to stop; the trainer saves a resumable checkpoint and exits with 75.

    Not an `Exception`, so that no handler of somebody's failures takes it for one.
    """

    exit_code = 75


__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "ModelError",
    "OutageError",
    "PalingenesisError",
    "RewardError",
    "SandboxError",
    "SkipSample",
    "StallError",
    "StopRun",
    "UsageError",
]

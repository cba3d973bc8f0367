"""Where programs run that are not trusted.

    open_sandbox(config) ──> Pool (pool.py) ──> rooms of a backend (room.py says how to add one)

`job.py` has what can be asked of it and what comes back.
"""

from __future__ import annotations

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.plugins import resolve
from palingenesis.rl.sandbox.job import Call, Check, Job, Program, Result, Sandbox, SandboxUsage, Status
from palingenesis.rl.sandbox.pool import Pool

BACKENDS = {
    "docker": "palingenesis.rl.sandbox.docker:DockerBackend",
    "bubblewrap": "palingenesis.rl.sandbox.bubblewrap:BubblewrapBackend",
    "agent_sandbox": "palingenesis.rl.sandbox.agent_sandbox:AgentSandboxBackend",
    "subprocess": "palingenesis.rl.sandbox.subprocess:SubprocessBackend",
}


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """The sandbox that a config names; `start()` it before use, and `close()` it.

    Raises:
        SandboxError: the backend refuses the config.
    """
    backend = resolve(config.backend, BACKENDS, "sandbox.backend")(config)
    return Pool(backend, config.workers, config.timeout)


__all__ = [
    "BACKENDS",
    "Call",
    "Check",
    "Job",
    "Program",
    "Result",
    "Sandbox",
    "SandboxUsage",
    "Status",
    "open_sandbox",
]

"""What the docker backend says where docker is not as it should be. The command is real; what it looks for is not there."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox import open_sandbox
from palingenesis.rl.sandbox.docker import DockerBackend, _unreachable

IMAGE = os.environ.get("SANDBOX_IMAGE", "palingenesis-sandbox:local")

needs_command = pytest.mark.skipif(shutil.which("docker") is None, reason="the docker command is not installed")


def why(**options: str) -> str:
    """The message of a start that fails."""
    with pytest.raises(SandboxError) as caught:
        open_sandbox(SandboxConfig(**({"backend": "docker", "workers": 2} | options))).start()
    return str(caught.value)


@pytest.fixture
def daemon() -> None:
    found = shutil.which("docker") and subprocess.run(
        ["docker", "image", "inspect", IMAGE], capture_output=True, check=False
    )
    if not found or found.returncode:
        pytest.skip(f"no docker daemon with {IMAGE}; scripts/sandbox-image makes both")


def test_without_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = why()
    assert message.startswith("sandbox.backend: docker needs the docker command")
    assert "bubblewrap" in message


@needs_command
def test_without_a_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    message = why()
    assert message.startswith(f"sandbox.backend: no docker daemon answers at unix://{tmp_path}/none.sock: ")
    assert "bubblewrap, which needs no daemon" in message


def test_without_permission() -> None:
    said = (
        "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: Get ..."
    )
    message = str(_unreachable(said))
    assert "refuses this user" in message
    assert "group docker" in message


def test_without_the_image(daemon: None) -> None:
    message = why(image="nowhere.invalid/none:1")
    assert message.startswith("sandbox.image: nowhere.invalid/none:1 is not on this machine and cannot be pulled: ")
    assert message.endswith("or pull it where there is a network and bring it with `docker save` and `docker load`.")


@pytest.fixture
def bare_image(daemon: None) -> Iterator[str]:
    """An image like ours, without Python."""
    name, container = "palingenesis-sandbox:no-python", "palingenesis-no-python"
    remove = ["docker", "run", f"--name={container}", "--network=none", "--log-driver=none", IMAGE]
    try:
        subprocess.run([*remove, "sh", "-c", "rm -f /usr/bin/python3*"], check=True, capture_output=True)
        subprocess.run(["docker", "commit", container, name], check=True, capture_output=True)
        yield name
    finally:
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=False)
        subprocess.run(["docker", "rmi", "--force", name], capture_output=True, check=False)


def test_without_python_in_the_image(bare_image: str) -> None:
    message = why(image=bare_image)
    assert message.startswith(f"sandbox.image: {bare_image} has no python3 to run the sandbox's worker with")
    assert "python:3.12-slim" in message


def test_the_daemon_is_looked_at_once_for_many_rooms(daemon: None) -> None:
    async def three() -> list[int]:
        backend = DockerBackend(SandboxConfig(backend="docker", image=IMAGE))
        rooms = await asyncio.gather(*(backend.open() for _ in range(3)))
        pids = [room.about["pid"] for room in rooms]
        await asyncio.gather(*(room.close() for room in rooms))
        await backend.close()
        return pids

    assert asyncio.run(three()) == [1, 1, 1], "the worker is PID 1 of its container"

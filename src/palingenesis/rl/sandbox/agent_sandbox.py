"""The `agent_sandbox` backend: pods of Kubernetes Agent Sandbox, claimed from a SandboxWarmPool through its SDK (1.x).

    open      SandboxClaim ──> a warm pod      upload inside/relay.py, start it: it starts the worker
    exchange  Pool ──> PodRoom ──thread──> SDK ──HTTP──> [router] ──> the pod's runtime ──> relay ──> worker
    close     delete the claim, and with it the pod

A room is a claim, made once and used for many jobs. A pod takes commands and files, no stdin, so a message is one command,
and an upload before it when the message is long. Isolation is the pool's RuntimeClass.

Invariants
- A claim's name is known before the claim exists, so whatever was begun can be deleted.
- Claims carry a time to end, which is renewed: a trainer that is killed leaves none behind for longer than `LEASE`.
- What a program can reach (runtime, files) only carries messages; both ends check that the other one wrote them.
- Trouble with the cluster is never the program's fault. A pod that answers while what it carries messages to does not, is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox.inside.relay import CALLER, UNHEARD, seal, unseal
from palingenesis.rl.sandbox.orders import CHECKER_GRACE, GRACE
from palingenesis.rl.sandbox.room import (
    BROKE,
    CLOSE_TIMEOUT,
    ENVIRONMENT,
    START_TIMEOUT,
    RoomLostError,
    WorkerSettings,
    worker_argv,
    worker_source,
)

T = TypeVar("T")

LEASE = 1800  # seconds that a claim outlives the trainer at most
RENEWAL = 600.0  # seconds between two renewals
MOST = 170.0  # seconds of one exchange: a router ends a request after 180, a runtime after 300
SLACK = 5.0  # seconds after which the caller gives the relay up, and after which the pod ends the caller
UPLOAD = 30  # seconds for an upload
EXPLOSION = 4096  # processes of the pod's user on its node: what bounds a fork bomb between two looks
INLINE = 60_000  # bytes of a message that fit into a command; one argument may have 128 KiB, quotes included
LABELS = {"app.kubernetes.io/managed-by": "palingenesis"}

NOT_INSTALLED = "sandbox.backend: agent_sandbox needs its SDK; pip install 'palingenesis[agent-sandbox]'"

# What to do about an exception of the SDK, or of the libraries below it, by the name of its class.
_CURES = {
    "ConfigException": "the Kubernetes API is not configured; run inside the cluster, or point KUBECONFIG to a kubeconfig",
    "MaxRetryError": "the Kubernetes API cannot be reached; check the kubeconfig's server with `kubectl version`",
    "SandboxWarmPoolNotFoundError": "there is no such pool; name one of `kubectl get sandboxwarmpools -n {namespace}`",
    "SandboxTemplateNotFoundError": "the pool's SandboxTemplate is missing; create it in the same namespace",
    "SandboxClaimFailedError": "the cluster gave up on the claim; see "
    "`kubectl describe sandboxwarmpool {warmpool} -n {namespace}`",
    "SandboxMetadataError": "somebody deleted the claim while it was waited for",
    "SandboxNotFoundError": "somebody deleted or replaced the claim while it was waited for",
    "TimeoutError": "no pod was ready in time; give the pool 2 replicas for each of sandbox.workers, and see "
    "`kubectl get pods -n {namespace}`",
    "SandboxRequestError": "a pod was claimed, but its runtime does not answer; check sandbox.connection, the template's "
    "networkPolicy, and that its image serves port 8888",
}
_STATUS_CURES = {
    401: "the Kubernetes API does not accept these credentials; renew the kubeconfig",
    403: "the trainer's account needs a Role with create, watch, patch and delete on "
    "sandboxclaims.extensions.agents.x-k8s.io, get on sandboxes.agents.x-k8s.io and, for gateway:<name>, watch on "
    "gateways.gateway.networking.k8s.io",
    404: "create the namespace, or install Agent Sandbox with its extensions",
}
_UNKNOWN = "see `kubectl describe sandboxclaims -n {namespace}`"


class AgentSandboxBackend:
    """Rooms in pods.

    Raises:
        SandboxError: the SDK is missing, the Kubernetes API is not configured, or `sandbox.timeout` is longer than a
            request to a pod may take.
    """

    def __init__(self, config: SandboxConfig) -> None:
        _refuse_too_long(config.timeout, config.timeout + CHECKER_GRACE + GRACE, "sandbox.timeout")
        self._config = config
        self._claims: set[str] = set()  # made, or about to be
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        try:
            self._client = _sdk().SandboxClient(_connection(config))
        except Exception as error:
            raise _explained(error, config) from error

    async def open(self) -> PodRoom:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        claim = f"pgs-{uuid.uuid4().hex[:16]}"
        self._claims.add(claim)
        try:
            async with asyncio.timeout(3 * START_TIMEOUT):  # the SDK has deadlines of its own, but not for every call
                pod = await _in_thread(lambda: self._claim(claim))
        except BaseException as error:
            await self._give_up(claim)
            if isinstance(error, Exception) and not isinstance(error, SandboxError):
                raise _explained(error, self._config) from error
            raise
        return PodRoom(pod, lambda: self._give_up(claim))

    async def close(self) -> None:
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
        await asyncio.gather(*map(self._give_up, tuple(self._claims)))

    def _claim(self, claim: str) -> Pod:
        """Blocking: a pod in which the worker is ready."""
        sandbox = self._client.create_sandbox(
            self._config.warmpool,
            self._config.namespace,
            sandbox_ready_timeout=int(START_TIMEOUT),
            labels=LABELS,
            claim_name=claim,
            shutdown_after_seconds=LEASE,
        )
        self._renew(claim)  # what the account may not do is found now
        pod = _start_worker(claim, sandbox, self._config)
        if self._closed:  # while this was under way
            self._delete(claim)
        return pod

    async def _give_up(self, claim: str) -> None:
        if claim in self._claims:
            self._claims.discard(claim)
            with contextlib.suppress(TimeoutError):  # the request goes on; should it fail, the claim ends by itself
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await _in_thread(lambda: self._delete(claim))

    def _delete(self, claim: str) -> None:
        """Blocking. The SDK logs what goes wrong, and raises nothing."""
        self._client.delete_sandbox(claim, self._config.namespace)

    async def _keep(self) -> None:
        """Renew all claims, for ever."""
        while True:
            await asyncio.sleep(RENEWAL)
            for claim in tuple(self._claims):
                try:
                    await _in_thread(lambda claim=claim: self._renew(claim))  # type: ignore[misc]
                except Exception as error:  # noqa: BLE001 - the cluster's; a claim that ends is a room that is replaced
                    warnings.warn(f"sandbox: claim {claim} was not renewed: {_said(error)}", stacklevel=1)

    def _renew(self, claim: str) -> None:
        end = (datetime.now(UTC) + timedelta(seconds=LEASE)).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {"spec": {"lifecycle": {"shutdownTime": end}}}
        self._client.k8s_helper.patch_sandbox_claim(claim, self._config.namespace, body)


@dataclass(frozen=True, slots=True)
class Pod:
    """A claimed pod with a relay in it.

    Attributes:
        sandbox: the SDK's handle. One call at a time.
        socket: the relay's name.
        key: known to the relay and to this process.
    """

    claim: str
    sandbox: Any
    socket: str
    key: bytes

    def carry(self, text: str, limit: float) -> Any:
        """Blocking: the SDK's result of the command that takes `text` to the relay and prints its answer."""
        if len(text) > INLINE:
            self.sandbox.files.write(self.socket, text, timeout=UPLOAD)
            text = f"@{self.socket}"
        command = ["python3", "-I", "-S", "-c", CALLER, self.socket, f"{limit + SLACK:.3f}", text]
        return self.sandbox.commands.run(shlex.join(command), timeout=int(limit), command_timeout=limit + 2 * SLACK)


class PodRoom:
    """A worker in a pod."""

    def __init__(self, pod: Pod, close: Callable[[], Any]) -> None:
        self._pod, self._close = pod, close
        self._number = 0

    @property
    def alive(self) -> bool:
        return True  # only an exchange can tell

    async def exchange(self, message: Mapping[str, Any], limit: float) -> dict[str, Any]:
        _refuse_too_long(limit - GRACE, limit, "a job's timeout")
        self._number += 1
        text = seal(self._pod.key, ">", self._number, f"{limit:.3f} {json.dumps(message)}")
        try:
            async with asyncio.timeout(limit + UPLOAD):
                result = await _in_thread(lambda: self._pod.carry(text, limit))
        except Exception as error:
            raise RoomLostError(f"pod of claim {self._pod.claim}: {_said(error)}") from error
        return self._event(result, begins="run" in message)

    async def close(self) -> None:
        await self._close()

    def _event(self, result: Any, begins: bool) -> dict[str, Any]:
        """What the worker answered. Anything else is the job's doing, unless the job had not begun."""
        answer = unseal(self._pod.key, "<", result.stdout)
        if answer is None or answer[0] != self._number:
            if begins and result.exit_code == UNHEARD:
                raise RoomLostError(f"pod of claim {self._pod.claim}: its worker has gone")
            raise RoomLostError("the program ended what carries its messages", broke=True)
        event: dict[str, Any] = json.loads(answer[1])
        if "gone" in event:
            code, errors = event["gone"], event["errors"].strip()
            broke = code == BROKE or code < 0
            how = (
                "the program ended what supervises it" if broke else f"the worker ended with exit code {code}: {errors}"
            )
            raise RoomLostError(f"pod of claim {self._pod.claim}: {how}", broke=broke)
        return event


def _start_worker(claim: str, sandbox: Any, config: SandboxConfig) -> Pod:
    """Blocking: upload the relay with a fresh key, start it, and hear that the worker is ready."""
    socket, key = f"pgs-{secrets.token_hex(8)}", secrets.token_bytes(32)
    settings = WorkerSettings(
        scratch="",  # the relay's to make, in a folder of the pod
        memory_mb=config.memory_mb,
        max_processes=config.max_processes,
        watch=True,
        user_processes=EXPLOSION,
    )
    _, *worker = worker_argv("python3", settings)
    order = {"key": key.hex(), "name": socket, "worker": worker, "environment": ENVIRONMENT}
    program = f"import sys\nsys.argv[1:] = [{json.dumps(order)!r}]\n{worker_source(('limits', 'relay'))}"
    sandbox.files.write(f"{socket}.py", program, timeout=UPLOAD)
    result = sandbox.commands.run(f"python3 -I -B {socket}.py", command_timeout=START_TIMEOUT)
    if result.exit_code != 0 or not result.stdout.startswith('{"ready"'):
        said = (result.stdout + result.stderr).strip()[-1500:]
        raise SandboxError(
            f"{_place(config)}: the worker does not start in the pod (exit code {result.exit_code}); the template's image "
            f"needs python3, 3.9 or newer, and a writable folder for the runtime. It said: {said}"
        )
    return Pod(claim, sandbox, socket, key)


def _sdk() -> Any:
    try:
        import k8s_agent_sandbox
    except ImportError as error:
        raise SandboxError(NOT_INSTALLED) from error
    return k8s_agent_sandbox


def _connection(config: SandboxConfig) -> Any:
    """The SDK's form of `sandbox.connection`."""
    from k8s_agent_sandbox import models

    kind, _, target = config.connection.partition(":")
    if kind == "gateway":
        return models.SandboxGatewayConnectionConfig(
            gateway_name=target, gateway_namespace=config.namespace, gateway_ready_timeout=int(START_TIMEOUT)
        )
    if kind == "url":
        return models.SandboxDirectConnectionConfig(api_url=target)
    return models.SandboxInClusterConnectionConfig()


def _refuse_too_long(timeout: float, limit: float, what: str) -> None:
    if limit > MOST:
        raise SandboxError(
            f"{what}: {timeout:g} seconds are too long for sandbox.backend agent_sandbox: a request to a pod ends after 3 "
            f"minutes; {MOST - GRACE - CHECKER_GRACE:g} are possible"
        )


def _place(config: SandboxConfig) -> str:
    return (
        f"sandbox.warmpool {config.warmpool!r} in sandbox.namespace {config.namespace!r}, "
        f"sandbox.connection {config.connection!r}"
    )


def _explained(error: Exception, config: SandboxConfig) -> SandboxError:
    """Whatever the SDK raised, as what to do about it."""
    if isinstance(error, SandboxError):
        return error
    names = [kind.__name__ for kind in type(error).__mro__]
    cure = _STATUS_CURES.get(getattr(error, "status", None) or 0) or next(
        (_CURES[name] for name in names if name in _CURES), _UNKNOWN
    )
    return SandboxError(f"{_place(config)}: {cure.format(**config.model_dump())}. ({_said(error)})")


def _said(error: BaseException) -> str:
    """One line on an exception and what caused it; a Kubernetes error by its message."""
    body = getattr(error, "body", None)
    if body:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(body)["message"])
    cause = f": {_said(error.__cause__)}" if error.__cause__ else ""
    return f"{type(error).__name__} {str(error).strip()[:300]}{cause}".replace("\n", " ")


async def _in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call on a daemon thread: a request that hangs holds up neither the loop nor the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
            future.set_exception(error)

    threading.Thread(target=work, name="pgs-pod", daemon=True).start()
    return await asyncio.wrap_future(future)


__all__ = ["AgentSandboxBackend"]

"""A cluster with Agent Sandbox in small: real HTTP, real watches, real processes, and no Kubernetes.

    SDK ──> API server    SandboxClaims (create, get, list, watch, patch, delete), Sandboxes, Gateways; RBAC
        ──> router        finds the pod by X-Sandbox-Id and -Namespace, proxies; also on a Gateway's address, port 80
        ──> pod           127.x.y.z:8888, the runtime of `agent_sandbox_pod.py`, in a container made by bubblewrap

The controller gives every claim a pod and a Sandbox of another name, as a warm pool does, and deletes claims whose
shutdownTime has passed. `Cluster` has a switch for each way in which a real one fails.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KUBECONFIG = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"  # a test points it at `Cluster.kubeconfig`
EXTENSIONS = "extensions.agents.x-k8s.io/v1beta1"
KINDS = {
    "sandboxclaims": (EXTENSIONS, "SandboxClaim"),
    "sandboxes": ("agents.x-k8s.io/v1beta1", "Sandbox"),
    "gateways": ("gateway.networking.k8s.io/v1", "Gateway"),
}
PATH = re.compile(r"/apis/(?P<group>[^/]+/[^/]+)/namespaces/(?P<ns>[^/]+)/(?P<plural>[^/]+)(/(?P<name>[^/]+))?")
POD_SOURCE = (Path(__file__).parent / "agent_sandbox_pod.py").read_text(encoding="utf-8")
POD_PORT = 8888
ADDRESSES = itertools.count(1)  # a pod's address is its own for the life of the test process

Object = dict[str, Any]


@cache
def missing() -> str:
    """Why no pod can be started on this machine; empty when they can."""
    command = _container(tempfile.gettempdir())
    if shutil.which(command[0]) is None or shutil.which("bwrap") is None:
        return "needs bubblewrap, which makes the pods: apt-get install bubblewrap"
    done = subprocess.run([*command, "/usr/bin/python3", "-V"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"cannot make a pod from this machine's /usr: {done.stderr.strip()}"


def _container(folder: str) -> list[str]:
    """The command prefix of a pod's first process: this machine's /usr read-only, `folder` as /app, user 1000, and the
    processes and temporary files of its own. The network is the machine's."""
    unprivileged = ["setpriv", "--reuid=61000", "--regid=61000", "--clear-groups"] if os.geteuid() == 0 else []
    links = [part for name in ("bin", "lib", "lib64", "sbin") for part in ("--symlink", f"usr/{name}", f"/{name}")]
    mounts = ["--ro-bind", "/usr", "/usr", *links, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    apart = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--die-with-parent"]
    user = ["--uid", "1000", "--gid", "1000", "--bind", folder, "/app", "--chdir", "/app"]
    return [*unprivileged, "bwrap", *mounts, *apart, *user]


class Pod:
    """A runtime on an address of its own. `kill` ends it as a lost node does: no process is left."""

    def __init__(self, form: str, python: bool = True) -> None:
        n = next(ADDRESSES)
        self.address = f"127.{70 + os.getpid() % 100}.{n // 250}.{n % 250 + 1}"
        self.folder = tempfile.mkdtemp(prefix="pod-")
        os.chmod(self.folder, 0o777)
        self.process = subprocess.Popen(
            [
                *(
                    *_container(self.folder),
                    "--clearenv",
                    "--setenv",
                    "PATH",
                    "/usr/bin:/bin" if python else "/nowhere",
                ),
                *("/usr/bin/python3", "-I", "-c", POD_SOURCE, self.address, "/app", form),
            ],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", "the pod did not start"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[str]:
        """Command lines of all that runs in the pod, its first process aside."""
        namespace = self._children(self.process.pid)
        init = namespace[0] if namespace else 0
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != init and _namespace_of(entry) == _namespace_of(init):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
        return [line for line in found if line]

    @staticmethod
    def _children(pid: int) -> list[int]:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]


def _namespace_of(process: Path | int) -> str:
    return os.readlink(Path("/proc") / str(getattr(process, "name", process)) / "ns" / "pid")


class Cluster:
    """The API server with its controller, a router, and the pods.

    Attributes:
        form: the runtime of new pods, `split` or `shell`.
        ready: how claims fare: `yes`, `never` (no pod is free), or a terminal reason of the claim controller.
        denied: `(verb, resource)` pairs that RBAC refuses, such as `("create", "sandboxclaims")`.
        pools: names of the warm pools there are.
        python: new pods have a python3 on their path.
        requests: every API call, as `(verb, resource)`.
    """

    def __init__(self, form: str = "split") -> None:
        self.form = form
        self.ready = "yes"
        self.denied: set[tuple[str, str]] = set()
        self.pools = {"python"}
        self.python = True
        self.namespaces = {"default"}
        self.installed = True
        self.requests: list[tuple[str, str]] = []
        self.pods: dict[str, Pod] = {}  # by Sandbox name
        self._changed = threading.Condition()
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._events: list[tuple[int, str, str, Object]] = []  # version, plural, type, object
        self._version = 0
        self._open = True
        self._new: queue.SimpleQueue[Object] = queue.SimpleQueue()
        self._api = _serve(("127.0.0.1", 0), API, self)
        self.router = Router(self)
        self.url = f"http://127.0.0.1:{self._api.server_port}"
        self._folder = tempfile.mkdtemp(prefix="kube-")
        self.kubeconfig = Path(self._folder) / "config"
        self.kubeconfig.write_text(json.dumps(self._config()))
        self._controller = threading.Thread(target=self._control, daemon=True)
        self._controller.start()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *args: object) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._controller.join()
        for server in (self._api, self.router.server):
            server.shutdown()
            server.server_close()
        for pod in list(self.pods.values()):
            pod.kill()
        shutil.rmtree(self._folder)

    # -- what tests look at and do -------------------------------------------------------------------------------------

    def claims(self) -> list[Object]:
        with self._changed:
            return [copy.deepcopy(o) for (plural, _, _), o in self._objects.items() if plural == "sandboxclaims"]

    def pod_of(self, claim: str) -> Pod:
        with self._changed:
            status = self._objects["sandboxclaims", "default", claim]["status"]
        return self.pods[status["sandbox"]["name"]]

    def add_gateway(self, name: str, address: str) -> None:
        self.put("gateways", "default", {"metadata": {"name": name}, "status": {"addresses": [{"value": address}]}})

    def processes(self) -> list[str]:
        return [line for pod in list(self.pods.values()) if pod.alive for line in pod.processes()]

    # -- objects -------------------------------------------------------------------------------------------------------

    def put(self, plural: str, namespace: str, obj: Object, kind: str = "ADDED") -> Object:
        with self._changed:
            self._version += 1
            version, kind_name = KINDS[plural]
            obj |= {"apiVersion": version, "kind": kind_name}
            obj["metadata"] |= {"namespace": namespace, "resourceVersion": str(self._version)}
            self._objects[plural, namespace, obj["metadata"]["name"]] = obj
            self._events.append((self._version, plural, kind, copy.deepcopy(obj)))
            self._changed.notify_all()
            return copy.deepcopy(obj)

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        with self._changed:
            return copy.deepcopy(self._objects.get((plural, namespace, name)))

    def remove(self, plural: str, namespace: str, name: str) -> bool:
        with self._changed:
            obj = self._objects.pop((plural, namespace, name), None)
            if obj is None:
                return False
            self._version += 1
            obj["metadata"]["resourceVersion"] = str(self._version)
            self._events.append((self._version, plural, "DELETED", obj))
            self._changed.notify_all()
        if plural == "sandboxclaims":
            sandbox = obj.get("status", {}).get("sandbox", {}).get("name", "")
            self.remove("sandboxes", namespace, sandbox)
            if pod := self.pods.pop(sandbox, None):
                pod.kill()
        return True

    def watch(self, plural: str, namespace: str, name: str, version: str, seconds: float) -> Iterator[Object | None]:
        """Events after `version` ("" and "0": what there is comes first); None once a moment with nothing new."""
        end = time.monotonic() + seconds
        with self._changed:
            seen = int(version or 0)
            if seen == 0:
                seen = self._version
                there = [copy.deepcopy(o) for (p, n, _), o in self._objects.items() if (p, n) == (plural, namespace)]
                first = [(seen, plural, "ADDED", obj) for obj in there]
            else:
                first = []
        while True:
            with self._changed:
                events = first or [event for event in self._events if event[0] > seen]
                first = []
                if not events:
                    self._changed.wait(0.1)
                seen = max([seen, *(event[0] for event in events)])
            for _, kind, event, obj in events:
                meta = obj["metadata"]
                if kind == plural and meta["namespace"] == namespace and (not name or meta["name"] == name):
                    yield {"type": event, "object": obj}
            if not self._open or time.monotonic() > end:
                return
            yield None

    # -- the controller ------------------------------------------------------------------------------------------------

    def created(self, claim: Object) -> None:
        """A claim came: the controller will give it a pod."""
        self._new.put(claim)

    def _control(self) -> None:
        """One thread for the cluster's life: a pod dies with the thread that started it (`--die-with-parent`)."""
        while self._open:
            with contextlib.suppress(queue.Empty):
                self._bind(self._new.get(timeout=0.1))
            self._expire()

    def _bind(self, claim: Object) -> None:
        name, namespace = claim["metadata"]["name"], claim["metadata"]["namespace"]
        pool = claim["spec"]["warmPoolRef"]["name"]
        if pool not in self.pools:
            self._condition(claim, "False", "WarmPoolNotFound", f"SandboxWarmPool {pool!r} not found")
        elif self.ready == "never":
            self._condition(claim, "False", "SandboxNotReady", "Pod is not scheduled")
        elif self.ready != "yes":
            self._condition(claim, "False", self.ready, "the controller says so")
        else:
            sandbox = f"{pool}-{name[-6:]}-warm"
            self.pods[sandbox] = pod = Pod(self.form, self.python)
            status = {"podIPs": [pod.address], "conditions": [{"type": "Ready", "status": "True"}]}
            self.put("sandboxes", namespace, {"metadata": {"name": sandbox}, "status": status})
            claim["status"] = {"sandbox": {"name": sandbox, "podIPs": [pod.address]}}
            if self.get("sandboxclaims", namespace, name):
                self._condition(claim, "True", "SandboxReady", "")
            else:  # deleted meanwhile
                self.pods.pop(sandbox).kill()

    def _condition(self, claim: Object, status: str, reason: str, message: str) -> None:
        condition = {"type": "Ready", "status": status, "reason": reason, "message": message}
        claim.setdefault("status", {})["conditions"] = [condition]
        self.put("sandboxclaims", claim["metadata"]["namespace"], claim, "MODIFIED")

    def _expire(self) -> None:
        for claim in self.claims():
            end = claim["spec"].get("lifecycle", {}).get("shutdownTime")
            if end and datetime.fromisoformat(end) < datetime.now(UTC):
                self.remove("sandboxclaims", claim["metadata"]["namespace"], claim["metadata"]["name"])

    def _config(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, content: bytes | Object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):  # a client that went
            self.wfile.write(data)


class API(Handler):
    """The Kubernetes API server's part."""

    def do_GET(self) -> None:
        if not (at := self.allowed()):
            return
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        cluster = self.server.owner
        if query.get("watch"):
            self.stream(at, name, query)
        elif at["name"]:
            obj = cluster.get(at["plural"], at["ns"], at["name"])
            self.reply(200, obj) if obj else self.refuse(404, "NotFound", f"{at['plural']} {at['name']!r} not found")
        else:
            items = [o for (p, n, _), o in cluster._objects.items() if (p, n) == (at["plural"], at["ns"])]
            self.reply(200, {"kind": "List", "metadata": {}, "items": items})

    def do_POST(self) -> None:
        body = self.body()
        if not (at := self.allowed()):
            return
        obj = json.loads(body)
        if self.server.owner.get(at["plural"], at["ns"], obj["metadata"]["name"]):
            return self.refuse(409, "AlreadyExists", f"{at['plural']} {obj['metadata']['name']!r} already exists")
        obj["metadata"]["uid"] = os.urandom(8).hex()
        created = self.server.owner.put(at["plural"], at["ns"], obj)
        self.reply(201, created)
        self.server.owner.created(created)

    def do_PATCH(self) -> None:
        body = self.body()
        if not (at := self.allowed()):
            return
        if self.headers["Content-Type"] != "application/merge-patch+json":
            return self.refuse(415, "UnsupportedMediaType", self.headers["Content-Type"])
        obj = self.server.owner.get(at["plural"], at["ns"], at["name"])
        if obj is None:
            return self.refuse(404, "NotFound", f"{at['plural']} {at['name']!r} not found")
        self.reply(200, self.server.owner.put(at["plural"], at["ns"], _merged(obj, json.loads(body)), "MODIFIED"))

    def do_DELETE(self) -> None:
        self.body()
        if not (at := self.allowed()):
            return
        if self.server.owner.remove(at["plural"], at["ns"], at["name"]):
            self.reply(200, {"kind": "Status", "status": "Success"})
        else:
            self.refuse(404, "NotFound", f"{at['plural']} {at['name']!r} not found")

    def allowed(self) -> dict[str, str] | None:
        """The parts of the path, or None after the request was refused."""
        found = PATH.fullmatch(urllib.parse.urlsplit(self.path).path)
        at = found.groupdict() if found else {}
        cluster = self.server.owner
        if not found or KINDS.get(at["plural"], ("",))[0] != at["group"] or not cluster.installed:
            self.reply(404, b"404 page not found\n")
            return None
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(self.command)
        verb = verb or ("watch" if "watch=" in self.path else "get" if at["name"] else "list")
        cluster.requests.append((verb, at["plural"]))
        if (verb, at["plural"]) in cluster.denied:
            who = "system:serviceaccount:default:trainer"
            what = f'cannot {verb} resource "{at["plural"]}" in API group "{at["group"]}"'
            self.refuse(403, "Forbidden", f'User "{who}" {what} in the namespace "{at["ns"]}"')
            return None
        if verb == "create" and at["ns"] not in cluster.namespaces:
            self.refuse(404, "NotFound", f'namespaces "{at["ns"]}" not found')
            return None
        return at

    def refuse(self, code: int, reason: str, message: str) -> None:
        self.reply(code, {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code})

    def stream(self, at: dict[str, str], name: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        seconds = float(query.get("timeoutSeconds", 60))
        events = self.server.owner.watch(at["plural"], at["ns"], name, query.get("resourceVersion", ""), seconds)
        with contextlib.suppress(OSError):  # a client that has seen enough
            for event in events:
                if event is not None:
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")


def _merged(obj: Object, patch: Object) -> Object:
    for key, value in patch.items():
        obj[key] = _merged(obj.get(key) or {}, value) if isinstance(value, dict) else value
    return obj


class Router:
    """The sandbox router: finds the pod by header, proxies the request.

    Attributes:
        status: answers this instead of proxying, when set (502).
        after: when True, the request reaches the pod before `status` is answered.
        delay: seconds before it does anything.
        served: requests that reached a pod.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.status = 0
        self.after = False
        self.delay = 0.0
        self.served = 0
        self.server = _serve(("127.0.0.1", 0), Proxy, self)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @contextlib.contextmanager
    def also_at(self, address: str, port: int) -> Iterator[None]:
        """The same router on a Gateway's address. Raises PermissionError when the port may not be used."""
        server = _serve((address, port), Proxy, self)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


class Proxy(Handler):
    def do_GET(self) -> None:
        self.forward(self.body())

    do_POST = do_GET

    def forward(self, body: bytes) -> None:
        router = self.server.owner
        time.sleep(router.delay)
        if router.status and not router.after:
            return self.reply(router.status, {"detail": "no healthy upstream"})
        if not (sandbox := self.headers["X-Sandbox-ID"]):
            return self.reply(400, {"detail": "X-Sandbox-ID header is required."})
        pod = router.cluster.pods.get(sandbox)
        if pod is None or not router.cluster.get("sandboxes", self.headers["X-Sandbox-Namespace"], sandbox):
            return self.reply(502, {"detail": f"Could not connect to the backend sandbox: {sandbox}"})
        connection = http.client.HTTPConnection(pod.address, int(self.headers["X-Sandbox-Port"]), timeout=180)
        try:
            headers = {key: value for key, value in self.headers.items() if key.lower() not in ("host", "connection")}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return self.reply(502, {"detail": f"Could not connect to the backend sandbox: {sandbox}"})
        finally:
            connection.close()
        router.served += 1
        self.reply(router.status or status, content)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    owner: Any

    def handle_error(self, *args: object) -> None:
        pass  # clients that go in the middle are part of the tests


def _serve(address: tuple[str, int], handler: type[Handler], owner: Any) -> Server:
    server = Server(address, handler)
    server.owner = owner
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server

"""The agent_sandbox backend, through the real SDK, against `tests/agent_sandbox_server.py`: a cluster in small.

What every backend promises is in test_sandbox.py; here is what only a cluster can do: refuse, be slow, lose a pod.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox import Call, Check, Job, Program, Result, Sandbox, Status, agent_sandbox, open_sandbox
from palingenesis.rl.sandbox.inside import relay
from tests.agent_sandbox_server import KUBECONFIG, Cluster, missing

pytest.importorskip("k8s_agent_sandbox", reason="needs the SDK: pip install 'palingenesis[agent-sandbox]'")
CREATE, WATCH, PATCH, DELETE = ("create", "watch", "patch", "delete")
NEEDED = {(verb, "sandboxclaims") for verb in (CREATE, WATCH, PATCH, DELETE)} | {("get", "sandboxes")}


@pytest.fixture(params=["split"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    monkeypatch.setenv("NO_PROXY", "*")
    with Cluster(request.param) as cluster:
        monkeypatch.setattr(KUBECONFIG, str(cluster.kubeconfig))
        yield cluster


class Opened:
    """Sandboxes that a test opened, closed at its end."""

    def __init__(self) -> None:
        self.all: list[Sandbox] = []

    def __call__(self, **options: Any) -> Sandbox:
        options = {"backend": "agent_sandbox", "warmpool": "python", "workers": 1, "timeout": 5.0, **options}
        sandbox = open_sandbox(SandboxConfig(**options))
        self.all.append(sandbox)
        sandbox.start()
        return sandbox


@pytest.fixture
def opened(cluster: Cluster) -> Iterator[Opened]:
    opened = Opened()
    yield opened
    for sandbox in opened.all:
        sandbox.close()
    assert not cluster.claims(), "claims were left behind"


def run(sandbox: Sandbox, *jobs: Job) -> list[Result]:
    return asyncio.run(sandbox.run(jobs))


def play(sandbox: Sandbox, source: str, **options: Any) -> Result:
    (result,) = run(sandbox, Program(textwrap.dedent(source), **options))
    return result


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def a_pod(cluster: Cluster) -> Any:
    return next(iter(cluster.pods.values()))


# -------------------------------------------------------------------------------------------- connections and runtimes

JOBS: tuple[Job, ...] = (
    Program("print(input()[::-1])", stdin="abc"),
    Call("def twice(x):\n    return [x] * 2", "twice", ((1, "'\"\\ $HOME"),)),
    Check("def up(x):\n    return x + 1", "assert up(1) == 2\nassert up(2) == 3", ("up",)),
    Check("def up(x):\n    return x - 1", "assert up(1) == 2", ("up",)),
)


def right(results: list[Result]) -> bool:
    program, call, passed, failed = results
    assert (program.status, program.stdout) == (Status.DONE, "cba\n")
    assert (call.status, call.value) == (Status.DONE, [(1, "'\"\\ $HOME")] * 2)
    return passed.status is Status.DONE and failed.status is Status.FAILED


@pytest.mark.parametrize("cluster", ["split", "shell"], indirect=True)
def test_in_cluster_speaks_to_the_pods(cluster: Cluster, opened: Opened) -> None:
    assert right(run(opened(), *JOBS))
    assert cluster.router.served == 0


@pytest.mark.parametrize("cluster", ["split", "shell"], indirect=True)
def test_url_speaks_to_the_router(cluster: Cluster, opened: Opened) -> None:
    assert right(run(opened(connection=f"url:{cluster.router.url}"), *JOBS))
    assert cluster.router.served > len(JOBS)


def test_gateway_is_found_by_name(cluster: Cluster, opened: Opened) -> None:
    cluster.add_gateway("front", "127.9.9.9")
    try:
        with cluster.router.also_at("127.9.9.9", 80):
            assert right(run(opened(connection="gateway:front"), *JOBS))
    except PermissionError:
        pytest.skip("needs port 80 on a loopback address: root, or sysctl net.ipv4.ip_unprivileged_port_start=80")
    assert ("watch", "gateways") in cluster.requests


@pytest.mark.parametrize("size", [agent_sandbox.INLINE - 2000, agent_sandbox.INLINE, 2_000_000])
def test_messages_of_any_size(cluster: Cluster, opened: Opened, size: int) -> None:
    sandbox = opened()
    text = "'" * 10 + "é\n" * (size // 4)
    before = os.listdir(a_pod(cluster).folder)
    assert play(sandbox, "import sys; print(hash(sys.stdin.read()))", stdin=text).stdout
    assert play(sandbox, "print(open(0).read(), end='')", stdin=text).stdout == text
    assert os.listdir(a_pod(cluster).folder) == before


# ------------------------------------------------------------------------------------------------------------- claims


def test_a_claim_a_room_kept_for_all_jobs_and_no_right_too_many(cluster: Cluster, opened: Opened) -> None:
    sandbox = opened(workers=2)
    run(sandbox, *[Program(f"print({n})") for n in range(10)])
    first, second = cluster.claims()
    assert cluster.requests.count((CREATE, "sandboxclaims")) == 2
    assert first["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "palingenesis"
    assert second["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
    pods = list(cluster.pods.values())
    sandbox.close()
    assert set(cluster.requests) <= NEEDED
    assert not cluster.claims()
    assert not any(pod.alive for pod in pods)


def test_claims_are_renewed_while_the_trainer_lives(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sandbox, "LEASE", 3)
    monkeypatch.setattr(agent_sandbox, "RENEWAL", 0.5)
    sandbox = opened()
    time.sleep(4)
    assert play(sandbox, "print(1)").stdout == "1\n"
    assert sandbox.usage().counts == {"done": 1}


TRAINER = """
import asyncio, sys
from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.sandbox import Program, agent_sandbox, open_sandbox
agent_sandbox.LEASE = 3
sandbox = open_sandbox(SandboxConfig(backend="agent_sandbox", warmpool="python", workers=2))
sandbox.start()
print("started", flush=True)
asyncio.run(sandbox.run([Program("import time; time.sleep(5)")] * 4))
"""


def test_a_killed_trainers_claims_end_by_themselves(cluster: Cluster) -> None:
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, env=environment)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"started\n"
    time.sleep(0.3)
    assert len(cluster.claims()) == 2
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    until(lambda: not cluster.claims(), 6)
    assert not cluster.processes()


def test_a_start_that_fails_half_way_leaves_no_claim(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = cluster._bind

    def first_only(claim: Any) -> None:
        bind(claim)
        cluster.ready = "PodFailed"

    monkeypatch.setattr(cluster, "_bind", first_only)
    with pytest.raises(SandboxError, match="the cluster gave up on the claim"):
        opened(workers=3)
    until(lambda: not cluster.claims() and not cluster.pods)


# ------------------------------------------------------------------------------------------------- what cannot be used


def unset(cluster: Cluster, **values: Any) -> None:
    for name, value in values.items():
        setattr(cluster, name, value)


REFUSALS: dict[str, tuple[Callable[[Cluster], object], dict[str, Any], str]] = {
    "no pool": (lambda c: None, {"warmpool": "pyhton"}, r"warmpool 'pyhton' .*there is no such pool.*kubectl get"),
    "no template": (lambda c: unset(c, ready="TemplateNotFound"), {}, r"SandboxTemplate is missing"),
    "gave up": (lambda c: unset(c, ready="InvalidConfiguration"), {}, r"gave up on the claim.*InvalidConfiguration"),
    "no create": (
        lambda c: c.denied.add((CREATE, "sandboxclaims")),
        {},
        r"Role with create, watch, patch.*cannot create",
    ),
    "no watch": (lambda c: c.denied.add((WATCH, "sandboxclaims")), {}, r"Role with create, watch, patch.*cannot watch"),
    "no patch": (lambda c: c.denied.add((PATCH, "sandboxclaims")), {}, r"Role with create, watch, patch.*cannot patch"),
    "no get": (lambda c: c.denied.add(("get", "sandboxes")), {}, r"Role with create, watch, patch.*cannot get"),
    "no namespace": (lambda c: None, {"namespace": "rl"}, r"namespace 'rl'.*create the namespace.*\"rl\" not found"),
    "not installed": (lambda c: unset(c, installed=False), {}, r"install Agent Sandbox with its extensions"),
    "not ready": (lambda c: unset(c, ready="never"), {}, r"no pod was ready in time; give the pool 2 replicas"),
    "no python": (lambda c: unset(c, python=False), {}, r"image needs python3.*python3"),
    "no router": (lambda c: None, {"connection": "url:http://127.0.0.1:9"}, r"its runtime does not answer.*refused"),
    "no gateway": (lambda c: None, {"connection": "gateway:front"}, r"gateway:front.*no pod was ready|Gateway 'front'"),
    "too long": (
        lambda c: None,
        {"timeout": 200.0},
        r"sandbox.timeout: 2.. seconds are too long .*1[0-9]. are possible",
    ),
    "no url": (lambda c: None, {"connection": "url:router:8080"}, r"url:router:8080.*(No connection adapters|Invalid)"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_start_that_cannot_be_says_why_and_what_to_do(
    case: str, cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, options, message = REFUSALS[case]
    monkeypatch.setattr(agent_sandbox, "START_TIMEOUT", 1.0)
    monkeypatch.setattr("urllib3.util.retry.Retry.sleep", lambda *_: None)
    prepare(cluster)
    with pytest.raises(SandboxError, match=f"(?s){message}"):
        opened(**options)
    cluster.denied.clear()


def test_without_a_kubeconfig(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "none"))
    with pytest.raises(SandboxError, match=r"sandbox\.warmpool 'python'.*point KUBECONFIG to a kubeconfig"):
        opened()


def test_without_an_api_server(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setattr(KUBECONFIG, str(tmp_path / "config"))
    with pytest.raises(SandboxError, match="cannot be reached; check the kubeconfig's server"):
        opened()


def test_without_the_sdk(cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "k8s_agent_sandbox", None)
    with pytest.raises(SandboxError, match=r"pip install 'palingenesis\[agent-sandbox\]'"):
        opened()


def test_a_job_that_is_longer_than_a_request_may_be(cluster: Cluster, opened: Opened) -> None:
    with pytest.raises(SandboxError, match=r"a job's timeout: 160 seconds are too long"):
        play(opened(), "print(1)", timeout=160.0)


# ---------------------------------------------------------------------------------------------------- trouble under way

SLEEP = "import time; time.sleep(1); print('slept')"


def in_the_middle(sandbox: Sandbox, trouble: Callable[[], object], source: str = SLEEP) -> Result:
    """The result of a job, in the middle of which there is trouble."""
    timer = threading.Timer(0.5, trouble)
    timer.start()
    result = play(sandbox, source)
    timer.join()
    return result


@pytest.mark.parametrize("connection", ["in_cluster", "url"])
def test_a_pod_that_vanishes_costs_a_second_try(cluster: Cluster, opened: Opened, connection: str) -> None:
    sandbox = opened(connection=connection if connection == "in_cluster" else f"url:{cluster.router.url}")
    result = in_the_middle(sandbox, lambda: a_pod(cluster).kill())
    assert (result.status, result.stdout) == (Status.DONE, "slept\n")
    assert sandbox.usage().counts == {"retried": 1, "replaced": 1, "done": 1}
    assert len(cluster.claims()) == 1


def test_a_claim_that_somebody_deletes_costs_a_second_try(cluster: Cluster, opened: Opened) -> None:
    sandbox = opened()
    (claim,) = cluster.claims()
    result = in_the_middle(sandbox, lambda: cluster.remove("sandboxclaims", "default", claim["metadata"]["name"]))
    assert (result.status, result.stdout) == (Status.DONE, "slept\n")
    assert sandbox.usage().counts == {"retried": 1, "replaced": 1, "done": 1}


@pytest.mark.parametrize("after", [False, True], ids=["before the pod", "after the pod"])
def test_a_router_that_answers_502(cluster: Cluster, opened: Opened, after: bool) -> None:
    sandbox = opened(connection=f"url:{cluster.router.url}")
    unset(cluster.router, status=502, after=after)
    result = play(sandbox, "print(1)")
    assert result.status is Status.UNAVAILABLE
    assert "502" in result.reason
    unset(cluster.router, status=0)
    until(lambda: play(sandbox, "print(1)").stdout == "1\n", 12)  # the pool tries again after a pause


def test_a_router_that_does_not_answer(cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = opened(connection=f"url:{cluster.router.url}")
    monkeypatch.setattr("palingenesis.rl.sandbox.orders.GRACE", 0.5)
    monkeypatch.setattr(agent_sandbox, "UPLOAD", 0.5)
    unset(cluster.router, delay=8.0)
    begun = time.monotonic()
    timer = threading.Timer(1.0, lambda: unset(cluster.router, delay=0.0))
    timer.start()
    result = play(sandbox, "print(1)", timeout=1.0)
    assert (result.status, result.stdout) == (Status.DONE, "1\n")
    assert time.monotonic() - begun < 6
    assert sandbox.usage().counts == {"retried": 1, "replaced": 1, "done": 1}


def test_a_cluster_without_pods_is_unavailable_and_comes_back(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sandbox, "START_TIMEOUT", 1.0)
    monkeypatch.setattr("palingenesis.rl.sandbox.pool.DOWN", 0.5)
    sandbox = opened(workers=2, connection=f"url:{cluster.router.url}")
    cluster.ready = "never"
    for pod in list(cluster.pods.values()):
        pod.kill()
    results = run(sandbox, *[Program("print(1)")] * 4)
    assert {result.status for result in results} == {Status.UNAVAILABLE}
    assert any("no pod was ready in time" in result.reason for result in results)
    cluster.ready = "yes"
    time.sleep(0.6)
    assert play(sandbox, "print(1)").stdout == "1\n"


@pytest.mark.slow
def test_no_job_is_scored_wrongly_while_pods_and_claims_go(
    cluster: Cluster, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palingenesis.rl.sandbox.pool.DOWN", 0.1)  # of the pause after a start that failed
    sandbox = opened(workers=3, connection=f"url:{cluster.router.url}")
    over = threading.Event()

    def trouble() -> None:
        """After every 30 requests: a slow machine has no more of it than a fast one."""
        for n in range(100):
            before = cluster.router.served
            while cluster.router.served < before + 30:
                if over.wait(0.01):
                    return
            if n % 3 == 0 and cluster.pods:
                a_pod(cluster).kill()
            elif n % 3 == 1 and cluster.claims():
                cluster.remove("sandboxclaims", "default", cluster.claims()[0]["metadata"]["name"])
            else:
                unset(cluster.router, status=502, after=n % 2 == 0)
                time.sleep(0.05)
                unset(cluster.router, status=0)

    thread = threading.Thread(target=trouble)
    thread.start()
    jobs: list[Job] = []
    for n in range(30):
        source = f"import time\ntime.sleep(0.05)\ndef f(x):\n    return x + {n % 2}"
        jobs += [Program(f"print({n})"), Check(source, "assert f(1) == 2", ("f",)), Call(source, "f", (n,))]
    results = run(sandbox, *jobs)
    over.set()
    thread.join()
    for n in range(30):
        program, check, call = results[3 * n : 3 * n + 3]
        if program.status.is_score:
            assert (program.status, program.stdout) == (Status.DONE, f"{n}\n"), program
        if check.status.is_score:
            assert check.status is (Status.DONE if n % 2 else Status.FAILED), check
        if call.status.is_score:
            assert (call.status, call.value) == (Status.DONE, n + n % 2), call
    assert sum(result.status.is_score for result in results) > len(results) / 2


# ------------------------------------------------------------------------------------------------ programs of bad faith

SUPERVISOR = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
EVERYTHING = """
    import contextlib, os, signal, time
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if pid != os.getpid():
                os.kill(pid, signal.{signal})
    time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "source"),
    [
        ("split", SUPERVISOR),
        ("split", EVERYTHING.format(signal="SIGKILL")),
        ("shell", EVERYTHING.format(signal="SIGKILL")),
        ("split", EVERYTHING.format(signal="SIGSTOP")),
        ("shell", EVERYTHING.format(signal="SIGSTOP")),
    ],
    ids=["supervisor", "everything", "everything, shell", "stopped", "stopped, shell"],
    indirect=["cluster"],
)
def test_a_program_that_breaks_its_room_is_found_out_on_two(
    cluster: Cluster, source: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = opened()
    with monkeypatch.context() as patched:
        patched.setattr("palingenesis.rl.sandbox.orders.GRACE", 1.0)
        patched.setattr(agent_sandbox, "SLACK", 1.0)
        assert play(sandbox, source, timeout=1.0).status is Status.BROKE
    assert sandbox.usage().counts == {"retried": 1, "replaced": 2, "broke": 1}
    assert play(sandbox, "print(1)").stdout == "1\n"


def test_the_runtime_is_out_of_a_programs_reach(cluster: Cluster, opened: Opened) -> None:
    """Ending the pod's first process would look like an outage; the runtime would run commands that outlive the job."""
    sandbox = opened()
    source = f"""
        import os, signal, socket, urllib.request
        for try_it in (
            lambda: os.kill(1, signal.SIGTERM),
            lambda: signal.pidfd_send_signal(os.pidfd_open(1), signal.SIGTERM),
            lambda: urllib.request.urlopen("http://{a_pod(cluster).address}:8888/"),
            lambda: socket.socket(socket.AF_INET6),
        ):
            try:
                print("done", try_it())
            except OSError as error:
                print("refused")
    """
    assert play(sandbox, source).stdout == "refused\n" * 4
    assert sandbox.usage().counts == {"done": 1}


def test_a_job_leaves_nothing_in_the_pods_folders(cluster: Cluster, opened: Opened) -> None:
    sandbox = opened()
    look = "import os; print([sorted(os.listdir(f)) for f in ('/app', '/tmp', '/dev/shm')])"
    before = play(sandbox, look).stdout
    litter = """
        import os
        for folder in ("/app", "/tmp", "/dev/shm"):
            os.makedirs(folder + "/deep/" + "d/" * 900)
            open(folder + "/deep/file", "w").write("for the next one")
            os.symlink("/etc", folder + "/link")
            os.mkdir(folder + "/closed")
            open(folder + "/closed/in", "w").close()
            os.chmod(folder + "/closed", 0)
    """
    assert play(sandbox, litter).status is Status.DONE
    assert play(sandbox, look).stdout == before
    assert sandbox.usage().counts == {"done": 3}


def test_the_carriers_key_and_word_are_out_of_a_programs_reach(cluster: Cluster, opened: Opened) -> None:
    """It finds the relay's socket and speaks to it; it cannot look into the relay; nothing it says is heard."""
    sandbox = opened()
    source = """
        import os, socket
        names = {line.split()[-1] for line in open("/proc/net/unix") if "@pgs-" in line}
        for name in names:
            for text in ('{"stop": true}', "0" * 64 + ' 9 {"stop": true}', "x", ""):
                link = socket.socket(socket.AF_UNIX)
                link.settimeout(0.1)
                link.connect("\\0" + name[1:])
                link.sendall(text.encode())
                link.shutdown(socket.SHUT_WR)
                try:
                    print(link.recv(100))
                except TimeoutError:
                    print("nothing")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if open(f"/proc/{pid}/cmdline", "rb").read().endswith(b".py\\0"):  # the relay
                for file in ("environ", "mem", "maps"):
                    try:
                        print(len(open(f"/proc/{pid}/{file}", "rb").read(1)))
                    except OSError as error:
                        print("no", file)
    """
    result = play(sandbox, source)
    assert result.status is Status.DONE, result
    said = result.stdout.split("\n")
    assert set(said) <= {"nothing", "no environ", "no mem", "no maps", ""}
    assert "nothing" in said
    assert sandbox.usage().counts == {"done": 1}


def test_a_message_counts_with_its_mac_and_its_direction() -> None:
    key = b"k" * 32
    sealed = relay.seal(key, ">", 7, '{"a": 1}')
    assert relay.unseal(key, ">", sealed) == (7, '{"a": 1}')
    assert relay.unseal(key, "<", sealed) is None
    assert relay.unseal(b"x" * 32, ">", sealed) is None
    assert relay.unseal(key, ">", sealed.replace("7", "8", 1)) is None
    assert relay.unseal(key, ">", sealed + " ") is None
    for text in ("", " ", "a b", "a -1 c", "a 1\n c", "é 1 x", f"{'0' * 64} {'9' * 5000} x"):
        assert relay.unseal(key, ">", text) is None

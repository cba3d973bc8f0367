#!/usr/bin/env python3
"""Speed of a sandbox: trivial stdin jobs through the warm pool, and what a job costs beyond a fork of a warm interpreter.

    eval "$(scripts/sandbox-image)"
    python bench/sandbox.py [--backends docker bubblewrap] [--jobs 20000] [--kills]

Throughput: `--jobs` programs that read a number and print its square, all handed over at once; every output is compared.
Latency: one such program at a time, alternating with the baseline, a process that has the usual modules loaded, forks, and
in the fork runs `exec(compile(source))` with its stdin and stdout on pipes, and is waited for. `added_ms` is the
difference of the medians. `--kills` kills containers, workers, supervisors and clients in the middle of 200 jobs each,
and a trainer at last: `wrong` counts jobs with a score that is not theirs, `left` what still runs after it.

The figures of the first backend stand at the top, those of the others under their names.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from typing import Any

from kills import KILLS, kill_one, kill_trainer
from record import record

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.sandbox import Program, Result, Status, open_sandbox
from palingenesis.rl.sandbox.inside.worker import WARM

KILLED = 10  # parts in 200 jobs: a supervisor killed twice under one job would look like that job's doing
SOURCE = "print(int(input()) ** 2)\n"

# Reads a line, answers with the milliseconds of one run.
BASELINE = f"""
import gc, os, sys, time
for name in {WARM!r}.split(): __import__(name)
gc.collect(); gc.disable(); gc.freeze()
source = {SOURCE!r}
for line in sys.stdin:
    began = time.perf_counter()
    (reads, stdin), (stdout, writes) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(reads, 0); os.dup2(writes, 1)
        exec(compile(source, "main.py", "exec"), {{"__name__": "__main__"}})
        sys.stdout.flush()
        os._exit(0)
    os.close(reads); os.close(writes)
    os.write(stdin, line.encode()); os.close(stdin)
    said = b""
    while part := os.read(stdout, 65536): said += part
    os.close(stdout)
    os.waitpid(pid, 0)
    spent = time.perf_counter() - began
    assert int(said) == int(line) ** 2
    print(spent * 1000, flush=True)
"""


def job(n: int) -> Program:
    return Program(SOURCE, f"{n}\n")


def right(n: int, result: Result) -> bool:
    return result.status is Status.DONE and result.stdout == f"{n * n}\n"


def throughput(sandbox: Any, jobs: int) -> dict[str, Any]:
    asyncio.run(sandbox.run([job(n) for n in range(50)]))  # warm
    sandbox.usage()
    began = time.perf_counter()
    results = asyncio.run(sandbox.run([job(n) for n in range(jobs)]))
    spent = time.perf_counter() - began
    failures = sum(not right(n, result) for n, result in enumerate(results))
    return {
        "jobs": jobs,
        "failures": failures,
        "jobs_per_s": round(jobs / spent, 1),
        "counts": dict(sandbox.usage().counts),
        "inside_ms_median": round(1000 * statistics.median(result.seconds for result in results), 2),
    }


def latency(sandbox: Any, rounds: int) -> dict[str, float]:
    ours, bare = [], []
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BASELINE], stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for n in range(rounds):
            process.stdin.write(f"{n}\n")
            bare.append(float(process.stdout.readline()))
            began = time.perf_counter()
            (result,) = asyncio.run(sandbox.run([job(n)]))
            ours.append(1000 * (time.perf_counter() - began))
            assert right(n, result), result
        process.stdin.close()
    return {
        "added_ms_median": round(statistics.median(ours) - statistics.median(bare), 2),
        "job_ms_median": round(statistics.median(ours), 2),
        "job_ms_p99": round(statistics.quantiles(ours, n=100)[-1], 2),
        "bare_ms_median": round(statistics.median(bare), 2),
    }


def killed(config: SandboxConfig, what: str, jobs: int = 200) -> dict[str, int]:
    """Kill a part of one room after another, in the middle of jobs."""
    sandbox: Any = open_sandbox(config)
    sandbox.start()
    results: list[Result] = []
    programs = [Program(f"import time; time.sleep(0.05); {SOURCE}", f"{n}\n") for n in range(jobs)]
    thread = threading.Thread(target=lambda: results.extend(asyncio.run(sandbox.run(programs))))
    thread.start()
    kills = 0
    while thread.is_alive() and kills < KILLED:
        time.sleep(0.25)
        kills += kill_one(what, list(sandbox.rooms))
    thread.join()
    wrong = sum(r.status is not Status.UNAVAILABLE and not right(n, r) for n, r in enumerate(results))
    status = Counter(str(result.status) for result in results)
    replaced = sandbox.usage().counts.get("replaced", 0)
    sandbox.close()
    return {"kills": kills, "jobs": len(results), "wrong": wrong, "replaced": replaced, **status}


def measure(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    config = SandboxConfig(
        backend=backend, image=args.image, workers=args.workers, allow_unsafe=backend == "subprocess"
    )
    sandbox = open_sandbox(config)
    began = time.perf_counter()
    sandbox.start()
    figures: dict[str, Any] = {"workers": args.workers, "start_s": round(time.perf_counter() - began, 2)}
    try:
        figures |= throughput(sandbox, args.jobs) | latency(sandbox, args.rounds)
    finally:
        sandbox.close()
    if args.kills:
        figures["kills"] = {what: killed(config, what) for what in KILLS}
        figures["kills"]["trainer"] = {"left": int(not kill_trainer(backend, args.image))}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["docker"], metavar="NAME")
    parser.add_argument("--image", default="palingenesis-sandbox:local")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=500, help="jobs whose latency is taken")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", action="store_true", help="as root: kill what a sandbox is made of, too")
    parser.add_argument("--smoke", action="store_true", help="few jobs; results are not kept")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.kills and os.getuid() != 0:
        parser.error("--kills must be root's: programs run as nobody")
    if args.smoke:
        args.jobs, args.rounds = 300, 50
    first, *others = [(backend, measure(backend, args)) for backend in args.backends]
    figures = {"backend": first[0], "load": round(os.getloadavg()[0], 1), **first[1], **dict(others)}
    if args.smoke:
        print(figures)
    else:
        record("sandbox", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The pool's own promises, over rooms that do what a test says: who is retried, replaced, blamed, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.observe import waits
from palingenesis.rl.sandbox import BACKENDS, Check, Program, Result, Status, open_sandbox
from palingenesis.rl.sandbox.pool import Pool
from palingenesis.rl.sandbox.room import RoomLostError

Act = Callable[[Mapping[str, Any]], dict[str, Any]]


def ended(**changes: Any) -> dict[str, Any]:
    return {"end": {"how": "exited", "code": 0, "stdout": "42\n", "seconds": 0.1} | changes}


def works(message: Mapping[str, Any]) -> dict[str, Any]:
    return ended()


def dies(message: Mapping[str, Any]) -> dict[str, Any]:
    raise RoomLostError("killed from outside")


def is_broken(message: Mapping[str, Any]) -> dict[str, Any]:
    raise RoomLostError("the program ended what supervises it", broke=True)


class Rooms:
    """A backend whose rooms take what they do from `script`, one act an exchange; then they work."""

    def __init__(self, *script: Act) -> None:
        self.script = list(script)
        self.opened: list[Room] = []
        self.refuse: list[SandboxError] = []  # raised by the next starts
        self.refused = 0
        self.closed = False

    async def open(self) -> Room:
        await asyncio.sleep(0)
        if self.refuse:
            self.refused += 1
            raise self.refuse.pop(0)
        self.opened.append(Room(self))
        return self.opened[-1]

    async def close(self) -> None:
        self.closed = True


class Room:
    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.closed = asyncio.Event()
        self.busy = False
        self.delay = 0.0
        self.alive = True

    async def exchange(self, message: Mapping[str, Any], limit: float) -> dict[str, Any]:
        assert not self.busy, "one exchange at a time"
        assert not self.closed.is_set(), "not after its end"
        self.busy = True
        await asyncio.sleep(self.delay)
        if self.delay and self.closed.is_set():
            raise RoomLostError("closed under it")
        act = self.rooms.script.pop(0) if self.rooms.script else works
        event = act(message)
        self.busy = False
        return event

    async def close(self) -> None:
        self.closed.set()


@contextmanager
def pool(rooms: Rooms, size: int = 1) -> Iterator[Pool]:
    script, rooms.script = rooms.script, []  # the trivial job at the start is not the test's
    made = Pool(rooms, size, timeout=6.0)
    made.start()
    rooms.script = script
    try:
        yield made
    finally:
        made.close()
    assert rooms.closed
    assert all(room.closed.is_set() for room in rooms.opened)


def play(made: Pool, count: int = 1) -> list[Result]:
    return asyncio.run(made.run([Program("")] * count))


@pytest.mark.parametrize(
    ("acts", "status", "opened"),
    [
        ([works], Status.DONE, 1),
        ([dies, works], Status.DONE, 2),
        ([is_broken, works], Status.DONE, 2),
        ([dies, dies], Status.UNAVAILABLE, 2),
        ([is_broken, is_broken], Status.BROKE, 2),
        ([dies, is_broken], Status.UNAVAILABLE, 2),
        ([is_broken, dies], Status.UNAVAILABLE, 2),
        ([lambda _: ended(code=1, stderr="ValueError: no\n")], Status.FAILED, 1),
        ([lambda _: ended(how="timeout", code=None)], Status.TIMEOUT, 1),
        ([lambda _: ended(how="limit", code=None, reason="more than 8 MiB of output")], Status.LIMIT, 1),
        ([lambda _: {}, works], Status.DONE, 2),
        ([lambda _: {"end": {"who": "knows"}}, lambda _: {"end": 7}], Status.UNAVAILABLE, 2),
    ],
)
def test_a_job_is_played_twice_at_most(acts: list[Act], status: Status, opened: int) -> None:
    rooms = Rooms(*acts)
    with pool(rooms) as made:
        assert play(made)[0].status is status
        assert len(rooms.opened) == opened
        lost = [room.closed.is_set() for room in rooms.opened]
        assert lost.count(True) == sum(act in (dies, is_broken) for act in acts) or opened == 2
        assert made.usage().counts.get("retried", 0) == (opened > 1)
        assert play(made)[0].status is Status.DONE


def test_rooms_are_kept_warm_and_used_one_job_at_a_time() -> None:
    rooms = Rooms()
    with pool(rooms, 3) as made:
        assert len(rooms.opened) == 3
        assert {result.status for result in play(made, 50)} == {Status.DONE}
        assert len(rooms.opened) == 3


def test_checkers_are_rooms_of_their_own_and_start_when_needed() -> None:
    def tests(message: Mapping[str, Any]) -> dict[str, Any]:
        assert message["run"]["mode"] == "test"
        return {"ask": '{"do": "call", "path": ["f"], "args": [], "kwargs": {}}'}

    def program(message: Mapping[str, Any]) -> dict[str, Any]:
        assert message["run"]["mode"] == "serve"
        assert "SECRET" not in str(message)
        return {"ask": '{"value": 1, "changed": {}}'}

    def verdict(message: Mapping[str, Any]) -> dict[str, Any]:
        assert message == {"answer": '{"value": 1, "changed": {}}'}
        return {"ask": '{"verdict": ""}'}

    stopped = ended(how="stopped", code=None)
    rooms = Rooms(tests, program, verdict, lambda _: stopped, lambda _: stopped)
    with pool(rooms) as made:
        (result,) = asyncio.run(made.run([Check("def f(): return 1", "SECRET", ("f",), helpers="SECRET")]))
        assert result.status is Status.DONE
        assert len(rooms.opened) == 2


def test_where_no_room_starts_every_job_is_unavailable_and_soon() -> None:
    rooms = Rooms(dies)
    with pool(rooms) as made:
        rooms.refuse = [SandboxError("sandbox.backend: no daemon")] * 500
        began = time.monotonic()
        results = play(made, 200)
        assert {(result.status, result.reason) for result in results} == {
            (Status.UNAVAILABLE, "sandbox.backend: no daemon")
        }
        assert time.monotonic() - began < 5
        assert rooms.refused < 10, "after two failures in a row nobody tries for a while"


def test_one_failed_start_is_tried_again() -> None:
    rooms = Rooms(dies)
    with pool(rooms) as made:
        rooms.refuse = [SandboxError("just now")]
        assert [result.status for result in play(made, 3)] == [Status.DONE] * 3
        assert made.usage().counts["retried"] == 2  # one had its room killed, the next found none


def test_a_start_that_fails_raises_and_leaves_nothing() -> None:
    rooms = Rooms()
    rooms.refuse = [SandboxError("sandbox.image: not there")]
    made = Pool(rooms, 3, timeout=6.0)
    with pytest.raises(SandboxError, match=r"sandbox\.image: not there"):
        made.start()
    assert rooms.closed
    assert all(room.closed.is_set() for room in rooms.opened)
    assert not [thread for thread in threading.enumerate() if thread.name == "pgs-sandbox"]


def test_a_backend_that_does_not_do_what_it_is_told_is_refused() -> None:
    with pytest.raises(SandboxError, match=r"a program that prints 42 ended done \(\), with output 'else'"):
        Pool(Rooms(lambda _: ended(stdout="else")), 1, timeout=6.0).start()


def test_a_job_that_is_given_up_costs_its_room() -> None:
    rooms = Rooms()
    with pool(rooms) as made:
        rooms.opened[0].delay = 5.0

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made.run([Program("")]), 0.1)

        asyncio.run(give_up())
        assert play(made)[0].status is Status.DONE
        assert rooms.opened[0].closed.is_set()


def test_close_ends_waiting_jobs_as_unavailable() -> None:
    rooms = Rooms()
    found: list[Result] = []
    with pool(rooms) as made:
        rooms.opened[0].delay = 0.3
        thread = threading.Thread(target=lambda: found.extend(play(made, 3)))
        thread.start()
        time.sleep(0.1)
    thread.join(10)
    assert [result.status for result in found] == [Status.UNAVAILABLE] * 3
    with pytest.raises(SandboxError, match="closed"):
        play(made)


def test_a_run_is_a_wait_that_moves() -> None:
    rooms = Rooms()
    with pool(rooms) as made:
        rooms.opened[0].delay = 0.05
        thread = threading.Thread(target=lambda: play(made, 5))
        thread.start()
        time.sleep(0.02)
        (wait,) = [wait for wait in waits._waits if wait.part == "sandbox"]
        assert wait.detail == "5 programs"
        thread.join(10)
        assert waits._moved["sandbox"][0] >= wait.began


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_of_the_config_has_a_class(backend: str) -> None:
    with contextlib.suppress(SandboxError):  # its service or package is not here, or it wants allow_unsafe
        open_sandbox(SandboxConfig(backend=backend)).close()

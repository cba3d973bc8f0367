"""What the program's process does. It ends here: no function returns to the worker.

    script   run source as `__main__`, with the stdin it was given
    serve    load source as the module `solution`; then answer requests: call, get or set something of it
    test     load tests over proxies; each use of a proxy is a request to the host, answered from the other room

Nothing here can be trusted once the program runs: it shares the process. So nothing here decides anything about the
program. A forged answer is still only its answer to this input, and tests run in a process that never held a program.
The names used here are bound before the program runs, so that a program that patches `json` or `builtins` for its own
ends does not trip over it.

A request:  {"do": "call" | "get" | "set", "path": [name or handle, attribute, ...], "args": [...], "kwargs": {...}}
An answer:  {"value": V, "changed": {position: V}} | {"method": true} | {"raised": [[class names], args]} | {"refused": why}
Tests say:  a request | {"verdict": "" for passed, else why not, "untestable": the fault is the tests' own}
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import io
import linecache
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from opcode import EXTENDED_ARG, opmap
from types import CodeType, ModuleType
from typing import Any, NoReturn

from palingenesis.rl.sandbox.inside import values

_Exit = os._exit
_MUTABLE = (list, dict, set)
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_read, _write = os.read, os.write
_STORE_NAME = opmap["STORE_NAME"]
_collect, _all_objects = gc.collect, gc.get_objects


class Channel:
    """Length-prefixed JSON to and from the supervisor."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes

    def started(self) -> None:
        """The process is confined; what happens from here on is the program's doing."""
        _write(self._writes, b"+")

    def ask(self, data: Any) -> Any:
        """Say something and wait for the answer."""
        text = values.dumps(data)
        view = memoryview(len(text).to_bytes(4, "big") + text)
        while view:
            view = view[_write(self._writes, view) :]
        return values.loads(self._exactly(int.from_bytes(self._exactly(4), "big")).decode("ascii"))

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = _read(self._reads, count)
            if not part:
                _Exit(1)  # the supervisor has gone
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def run(order: Mapping[str, Any], channel: Channel, folder: str) -> NoReturn:
    """Carry out an order and end the process. Its descriptors 0, 1 and 2 are the program's."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed(0)  # a fork reseeds it; a score is a function of the program and its input
    gc.enable()
    channel.started()
    _finish(_outcome(lambda: _MODES[order["mode"]](order, channel)))


# ------------------------------------------------------------------------------------------------- loading and ending


def _script(order: Mapping[str, Any], channel: Channel) -> None:
    channel.close()
    namespace = _module("__main__")
    _execute(order["prelude"], "prelude.py", namespace)
    _execute(order["source"], sys.argv[0], namespace)


def _module(name: str) -> dict[str, Any]:
    """The namespace of a new module that others can import."""
    module = ModuleType(name)
    sys.argv = [f"{name.strip('_')}.py"]
    module.__dict__.update(__builtins__=builtins, __file__=sys.argv[0])
    sys.modules[name] = module
    return module.__dict__


def _execute(source: str, file: str, namespace: dict[str, Any]) -> CodeType:
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # so that tracebacks show lines
    code = compile(source, file, "exec", dont_inherit=True)
    exec(code, namespace)
    return code


def _outcome(work: Callable[[], None]) -> int:
    """The exit code that Python would end with."""
    try:
        work()
        return 0
    except SystemExit as exit_:
        code = exit_.code
        if code is None or type(code) is int:
            return (code or 0) & 0xFF
        _complain(f"{code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 the program's, whatever it is
        _report(error)
        return 1


def _report(error: BaseException) -> None:
    """The traceback as Python prints it, without our frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:  # noqa: BLE001 an exception class of the program's that cannot be printed
        text = f"{type(error).__name__}\n"
    _complain(text)


def _complain(text: str) -> None:
    try:
        sys.stderr.write(text)
    except BaseException:  # noqa: BLE001 the program closed or replaced it
        with contextlib.suppress(OSError):
            _write(2, text.encode("utf-8", "replace"))


def _finish(code: int) -> NoReturn:
    """End as the interpreter does: threads, exit handlers, buffers, the program's own objects; other modules stay whole."""
    for step in (_join_threads, _run_exit_handlers, _flush, _flush_files, _forget_program, _flush):
        try:
            step()
        except BaseException as error:  # noqa: BLE001 the program's handlers, streams and destructors
            _report(error)
            code = code or 120
    _Exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _flush_files() -> None:
    """Write what is in the buffers of files left open: text into bytes, then bytes. A collection ends them in any order."""
    files = [found for found in _all_objects() if type(found) in _FILES]
    for file in sorted(files, key=lambda file: _FILES.index(type(file))):
        with contextlib.suppress(Exception):  # closed, or over something of the program's own
            file.flush()


def _forget_program() -> None:
    """Let go of the program's module: `__del__` is called, with its globals still there."""
    sys.modules.pop("__main__", None)
    _collect()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # what it put there instead has gone with it


_join_threads: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]
_run_exit_handlers: Callable[[], None] = atexit._run_exitfuncs


# ------------------------------------------------------------------------------------------------- serving a program


def _serve(order: Mapping[str, Any], channel: Channel) -> None:
    namespace = _module("solution")
    _execute(order["prelude"], "prelude.py", namespace)
    before = dict(namespace)
    names = Names(namespace, before, _execute(order["source"], sys.argv[0], namespace))
    objects = Objects("solution")
    request = values.loads(order["request"])
    while True:
        answer = _answer(request, names, objects)
        try:
            request = channel.ask(answer)
        except values.NotPlainError as error:  # within the limit of a value, and as text beyond that of a message
            request = channel.ask({"refused": str(error)})


class Names:
    """What the source itself defines. The prelude's imports are not: `gcd` of an answer that is empty is no answer."""

    def __init__(self, namespace: Mapping[str, Any], before: Mapping[str, Any], code: CodeType) -> None:
        self._namespace, self._before, self._code = namespace, before, code

    def function(self, name: str) -> Any:
        """A function or class of the module's; None when it defines none of that name."""
        found = self._namespace.get(name)
        if not callable(found) or (found is self._before.get(name) and name not in _bound(self._code)):
            return None
        return found

    def method(self, name: str) -> Any:
        """A method of `Solution`, bound to a new one; None when there is none."""
        solution = self.function("Solution")
        return getattr(solution(), name) if callable(getattr(solution, name, None)) else None


def _bound(code: CodeType) -> set[str]:
    """Names that a module's code assigns, defines or imports: `from math import gcd` binds what was there already."""
    names, high = set(), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2]):  # noqa: B905 (Python 3.9)
        at = high << 8 | low
        high = at if operation == EXTENDED_ARG else 0
        if operation == _STORE_NAME:
            names.add(code.co_names[at])
    return names


class Objects:
    """The program's own instances that were handed out, by number."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._known: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id; the list keeps them alive

    def number(self, value: Any) -> list[Any]:
        if type(value).__module__ != self._module:
            values.refuse(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._known)
            self._known.append(value)
        return [self._numbers[id(value)], type(value).__name__]

    def get(self, number: Any) -> Any:
        return self._known[number]


def _answer(request: Mapping[str, Any], names: Names, objects: Objects) -> dict[str, Any]:
    number = objects.number if request.get("handles") else values.refuse

    def decoded(data: Any) -> Any:
        return values.decode(data, objects.get)

    args = [decoded(value) for value in request["args"]]
    kwargs = {name: decoded(value) for name, value in request["kwargs"].items()}
    try:
        *path, last = request["path"]
        target = _target(path, names, objects) if path else None
        if request["do"] == "set":
            setattr(target, last, args[0])
            return {"value": None, "changed": {}}
        found = getattr(target, last) if path else _target([last], names, objects, request.get("method_first", False))
        if request["do"] == "get":
            if callable(found):
                return {"method": True}
            value = found
        else:
            value = found(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 the program's own: the test or the caller gets it
        return {"raised": _described(error), "trace": _last_line(error)}
    try:
        changed = {}
        for at, (arg, sent) in enumerate(zip(args, request["args"])):  # noqa: B905 (Python 3.9)
            if type(arg) in _MUTABLE:
                now = values.encode(arg, number)
                if now != sent:
                    changed[str(at)] = now
        return {"value": values.encode(value, number), "changed": changed}
    except values.NotPlainError as error:
        return {"refused": str(error)}


def _target(path: list[Any], names: Names, objects: Objects, method_first: bool = False) -> Any:
    """A handle's object or a function of the module or a method of its `Solution`, and then attributes."""
    first, *rest = path
    if type(first) is int:
        found = objects.get(first)
    else:
        ways = (names.method, names.function) if method_first else (names.function, names.method)
        found = next((found for way in ways if (found := way(first)) is not None), None)
        if found is None:
            raise NameError(f"name {first!r} is not defined")
    for name in rest:
        found = getattr(found, name)
    return found


def _described(error: Exception) -> list[Any]:
    """Names of the built-in classes among an exception's, nearest first, and its arguments."""
    names = [kind.__name__ for kind in type(error).__mro__ if vars(builtins).get(kind.__name__) is kind]
    try:
        args = values.encode(list(error.args))
    except values.NotPlainError:
        args = [str(error)]
    return [names, args]


def _last_line(error: Exception) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()[-300:]


# ------------------------------------------------------------------------------------------- running tests over proxies


class Untestable(Exception):
    """The tests cannot be run here, whatever the program is."""

    __module__ = "builtins"  # it is shown by its bare name


_theirs: list[Exception] = []  # what the program raised


def _is_ours(error: Exception) -> bool:
    """The tests are at fault, and no program could make it seem so: they import what is not here, or what they pass can
    never reach a program."""
    return isinstance(error, (Untestable, ImportError)) and all(error is not one for one in _theirs)


def _test(order: Mapping[str, Any], channel: Channel) -> None:
    namespace = _module("tests")
    verdict, untestable = "", False
    try:
        _execute(order["helpers"], "helpers.py", namespace)
        for name in order["names"]:
            namespace[name] = Proxy(channel, [name])
        _execute(order["tests"], "tests.py", namespace)
        if order["entry_point"]:
            namespace["check"](Proxy(channel, [order["entry_point"]]))
    except Exception as error:  # noqa: BLE001 a failed test; what is not an Exception ends the process, and fails too
        _report(error)
        verdict, untestable = _where(error) or "failed", _is_ours(error)
    channel.ask({"verdict": verdict, "untestable": untestable})


def _where(error: Exception) -> str:
    """`AssertionError: ... (tests.py, line 3: assert f(1) == 2)`."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    place = f" (tests.py, line {lines[-1].lineno}: {lines[-1].line})" if lines else ""
    return _last_line(error) + place


class Proxy:
    """A function, class or method of the program: using it asks the other room.

    It can be called, and its public attributes read and set. It has no truth value, order, equality or text: each would be
    the program's own word, or hold for whatever it gave out (`f(1) != f(2)`), and so it fails the test. `is` compares.
    """

    def __init__(self, channel: Channel, path: list[Any]) -> None:
        vars(self).update(_channel=channel, _path=path, __name__=str(path[-1]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", vars(self)["_path"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private to the program under test")
        return _ask(self, "get", [*vars(self)["_path"], name])

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", [*vars(self)["_path"], name], (value,))

    def __eq__(self, other: object) -> bool:
        return self._no() if other is not None else False

    def __ne__(self, other: object) -> bool:
        return self._no() if other is not None else True

    __hash__ = object.__hash__

    def _no(self, *_: object) -> NoReturn:
        kind = vars(self).get("_kind", "function")
        raise TypeError(
            f"a {kind} of the program under test: only its public attributes and what it returns count here"
        )

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __str__ = __repr__ = __format__ = _no


class Handle(Proxy):
    """An instance of one of the program's classes."""

    def __init__(self, channel: Channel, path: list[Any], kind: str) -> None:
        super().__init__(channel, path)
        vars(self)["_kind"] = kind

    __call__ = Proxy._no


_handles: dict[int, Handle] = {}  # one for each object, so that `is` means what it should


def _ask(proxy: Proxy, do: str, path: list[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}) -> Any:
    channel: Channel = vars(proxy)["_channel"]

    def handle(inner: Any) -> Handle:
        number, kind = inner
        if number not in _handles:
            _handles[number] = Handle(channel, [number], str(kind))
        return _handles[number]

    def outgoing(value: Any) -> Any:
        if type(value) is Handle:
            return vars(value)["_path"][0]
        told = f"the tests pass a {type(value).__name__} to the program, not a plain value"
        raise values.NotPlainError(told) if type(value) is Proxy else Untestable(told)

    request = {
        "do": do,
        "path": path,
        "args": [values.encode(arg, outgoing) for arg in args],
        "kwargs": {name: values.encode(arg, outgoing) for name, arg in kwargs.items()},
        "handles": True,
    }
    answer = channel.ask(request)
    if "raised" in answer:
        error = _nearest(answer["raised"])
        _theirs.append(error)
        raise error
    if "refused" in answer:
        raise TypeError(f"{path[-1]}: {answer['refused']}")
    if "method" in answer:
        return Proxy(channel, path)
    for at, data in answer["changed"].items():
        _apply(args[int(at)], values.decode(data, handle))
    return values.decode(answer["value"], handle)


def _nearest(described: Any) -> Exception:
    names, args = described
    args = values.decode(args)
    if "StopIteration" in names or "StopAsyncIteration" in names:  # which would end a loop of the tests', and pass
        return RuntimeError(*args)
    for name in names:
        kind = vars(builtins).get(name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(*args)
            except TypeError:  # UnicodeDecodeError and the like want exactly their own
                continue
    return Exception(*args)


def _apply(old: Any, new: Any) -> None:
    """Make `old` equal to `new` in place, keeping the identity of what it holds where the shapes agree."""
    if type(old) is not type(new) or type(old) not in _MUTABLE:
        raise TypeError(f"the program claims to have turned a {type(old).__name__} into a {type(new).__name__}")

    def merged(was: Any, now: Any) -> Any:
        if type(was) is type(now) and type(was) in _MUTABLE:
            _apply(was, now)
            return was
        return now

    if type(old) is list:
        old[:] = [merged(old[at], item) if at < len(old) else item for at, item in enumerate(new)]
    elif type(old) is dict:
        kept = {key: merged(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(kept)
    else:
        old.clear()
        old.update(new)


_MODES: dict[str, Callable[[Mapping[str, Any], Channel], None]] = {"script": _script, "serve": _serve, "test": _test}

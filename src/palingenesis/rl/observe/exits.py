"""Exit codes: the one place that turns exceptions into messages.

    0 done · 1 failed, one message · 2 usage · 75 stopped on a signal after saving · 130 interrupted

Anything but a `PalingenesisError` is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from palingenesis.rl.errors import PalingenesisError, StopRun

LEAVE_S = 10.0  # the interpreter's own end takes well under a second, unless it waits for a thread


def leave(code: int) -> NoReturn:
    """End the process. A thread of the user's that never returns (a thread pool's would be waited for) is left behind."""
    guard = threading.Timer(LEAVE_S, os._exit, [code])
    guard.daemon = True
    guard.start()
    sys.exit(code)


def exit_code(work: Callable[[], None]) -> int:
    """Run `work`; print what the user must know and return the process's exit code."""
    try:
        work()
    except SystemExit as stop:  # argparse: help, version
        return stop.code if isinstance(stop.code, int) else _said(str(stop.code), 1) if stop.code else 0
    except StopRun as stop:
        return _said(f"{stop}.", stop.exit_code)
    except PalingenesisError as error:
        return _said(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        return _said("interrupted.", 130)
    except BrokenPipeError:  # the reader of our output (`| head`) has seen enough
        sys.stderr.close()
    return 0


def _said(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code

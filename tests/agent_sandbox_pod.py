"""The runtime inside a pod of `agent_sandbox_server.py`: its source is the pod's first process, `python3 -I -c`.

It answers the routes that the SDK calls, in the two forms that images have:

    split    the command is split by shlex and run without a shell; one request at a time, no time limit
    shell    `/bin/sh -c` in a session of its own, killed with its session after `timeout_seconds`

Arguments: address, folder (commands run there, files go there), form. Standard library only.
"""

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8888
ADDRESS, FOLDER, FORM = sys.argv[1:4]
ONE_AT_A_TIME = threading.Lock() if FORM == "split" else contextlib.nullcontext()


def execute(request: dict) -> dict:
    try:
        return (split if FORM == "split" else shell)(request)
    except Exception as error:  # noqa: BLE001 - as the runtime does it
        return {"stdout": "", "stderr": f"Failed to execute command: {error}", "exit_code": 1}


def split(request: dict) -> dict:
    done = subprocess.run(shlex.split(request["command"]), capture_output=True, text=True, cwd=FOLDER, check=False)
    return {"stdout": done.stdout, "stderr": done.stderr, "exit_code": done.returncode}


def shell(request: dict) -> dict:
    seconds = min(300.0, request.get("timeout_seconds") or 300.0)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["/bin/sh", "-c", request["command"]], stdout=pipe, stderr=pipe, text=True, cwd=FOLDER, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            return {"stdout": stdout, "stderr": stderr + "\ntimed out", "exit_code": 124, "timed_out": True}
    return {"stdout": stdout, "stderr": stderr, "exit_code": process.returncode}


def inside(name: str) -> str:
    """The path of a file in the folder; raises ValueError for one outside."""
    path = os.path.realpath(os.path.join(FOLDER, urllib.parse.unquote(name).lstrip("/")))
    if os.path.commonpath([path, os.path.realpath(FOLDER)]) != os.path.realpath(FOLDER):
        raise ValueError("Access denied")
    return path


class Runtime(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        with ONE_AT_A_TIME:
            _, route, *rest = self.path.split("/", 2)
            if route == "":
                return self.reply(200, {"status": "ok"})
            path = inside(rest[0])
            if route == "exists":
                return self.reply(200, {"path": rest[0], "exists": os.path.exists(path)})
            if route == "list" and os.path.isdir(path):
                return self.reply(200, [entry(e) for e in os.scandir(path)])
            if route == "download" and os.path.isfile(path):
                with open(path, "rb") as file:
                    return self.reply(200, file.read())
            return self.reply(404, {"message": "File not found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with ONE_AT_A_TIME:
            if self.path == "/execute":
                return self.reply(200, execute(json.loads(body)))
            if self.path == "/upload":
                return self.upload(body)
            return self.reply(404, {"detail": "Not Found"})

    def upload(self, body: bytes) -> None:
        boundary = b"\r\n--" + self.headers.get_param("boundary", header="Content-Type").encode()
        part = (b"\r\n" + body).split(boundary)[1]
        head, _, content = part.partition(b"\r\n\r\n")
        name = re.search(rb'filename="([^"]*)"', head).group(1).decode()
        try:
            with open(inside(name), "wb") as file:
                file.write(content)
        except ValueError:
            return self.reply(403, {"message": "Access denied"})
        except OSError as error:
            return self.reply(500, {"message": f"File upload failed: {error}"})
        return self.reply(200, {"message": f"File '{name}' uploaded successfully."})

    def reply(self, status: int, content: object) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):  # a client that went
            self.wfile.write(data)


def entry(e: os.DirEntry) -> dict:
    kind = "directory" if e.is_dir() else "file"
    return {"name": e.name, "size": e.stat().st_size, "type": kind, "mod_time": e.stat().st_mtime}


class Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the pod ends with the test that started it
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # as the real server's, which matters: it is process 1
    server = Server((ADDRESS, PORT), Runtime)
    print("ready", flush=True)
    server.serve_forever()

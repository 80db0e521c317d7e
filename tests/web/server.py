"""`patchlight serve` in a process of its own, so that its memory, its files and its output can be watched."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

WEB = httpx.Client(verify=False, trust_env=False, timeout=120)
"""One client for all: each that is made reads the certificates of the world first."""


@dataclass
class Server:
    """A running server: where it is, what it printed, and its process."""

    host: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    temporary: Path

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def memory(self) -> float:
        """Resident memory of the process, in MB."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def written(self) -> set[str]:
        """The files that are open to write, besides what it prints into."""
        files = psutil.Process(self.process.pid).open_files()
        return {file.path for file in files if file.mode != "r"} - {str(self.log)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def serving(folder: Path, *options: str, model: str = "pocket", token: str = "") -> Iterator[Server]:
    """A server that is ready, stopped on leaving; it works in `folder`, and its temporary files would lie there too."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    log = folder / "log.txt"
    port = free_port()
    command = [sys.executable, "-m", "patchlight", "serve", "--model", model, "--port", str(port), *options]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
    server = Server("127.0.0.1", port, process, log, temporary)
    try:
        _wait(server, {"Authorization": f"Bearer {token}"} if token else {})
        yield server
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Server, headers: dict[str, str], seconds: float = 240) -> None:
    """Until the server answers; what it printed, if it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if WEB.get(f"{server.url}/api/model", headers=headers).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not come up:\n{server.printed()}")

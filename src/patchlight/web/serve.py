"""A server for a model: uvicorn with the guard, in this thread or in another."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import quote

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from patchlight.core.errors import PatchlightError
from patchlight.web.app import BODIES, create_app
from patchlight.web.guard import Guard
from patchlight.web.service import ModelService

HEAD_SECONDS, READ_SECONDS, MOST_CONNECTIONS = 10.0, 30.0, 256
"""Seconds for the head of a request, seconds that an answer may stay unread, and the largest number of connections."""


class TimeLimitedProtocol(H11Protocol):
    """HTTP/1.1 with time limits: clients that do not complete a header, or do not read a response, are disconnected.

    Errors of uvicorn itself are JSON, like all others.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app = self._refuse if len(self.connections) > MOST_CONNECTIONS else self.config.loaded_app
        self._expect_head(HEAD_SECONDS)

    async def _refuse(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request on a connection over the limit, instead of the application."""
        words = f"{MOST_CONNECTIONS} connections are open; try again in a moment."
        headers = {"retry-after": "1", "connection": "close", "x-content-type-options": "nosniff"}
        await JSONResponse({"error": words}, 503, headers)(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": msg}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._expect_head(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answering:
            self._expect_head(HEAD_SECONDS + self.timeout_keep_alive)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_head(None)
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self, seconds: float | None) -> None:
        """Disconnect after some seconds unless a request has arrived by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if not self._answering and not self.transport.is_closing():
            self.transport.abort()  # close() would wait until the client has read everything


def guarded(
    service: ModelService, hosts: frozenset[str] = frozenset(), token: str | None = None, embedded: bool = False
) -> ASGIApp:
    """The application of a model service behind its guard."""
    return Guard(create_app(service), BODIES, hosts, token, embedded)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there.

    >>> is_loopback("127.0.0.2"), is_loopback("127.example.org")
    (True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server:
    """A model on a port. `run` serves in this thread until interrupted; `start` and `stop` use another thread.

    Port 0 takes a free one, which the attribute `port` then has; the other options are those of `Guard`.
    """

    def __init__(
        self,
        service: ModelService,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        hosts: frozenset[str] = frozenset(),
        embedded: bool = False,
    ) -> None:
        self.service, self.host, self.token = service, host, token
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            guarded(service, hosts | {host}, token, embedded),
            http=TimeLimitedProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=2**16,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.port}/" + (f"#token={quote(self.token, safe='')}" if self.token else "")

    @property
    def running(self) -> bool:
        """Whether it serves in another thread."""
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.service.close()

    def start(self) -> None:
        """Serve in another thread; returns when the server answers."""
        self._thread = threading.Thread(target=self.run, name="patchlight-server", daemon=True)
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise PatchlightError(f"The server did not start on {self.host}:{self.port}.")
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(30)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio then sets TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, TypeError) as error:  # TypeError: the host name cannot be encoded
        listener.close()
        reason = getattr(error, "strerror", error)
        raise PatchlightError(f"Cannot listen on {host}:{port}: {reason}; --port 0 takes a free port.") from error
    return listener

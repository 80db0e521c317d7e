"""Checks that run before the application sees a request: host, origin, token, and the size and time of the body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

import anyio
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchlight.web import Refused
from patchlight.web.images import MOST_BYTES

MOST_JSON = 2**20
BODY_SECONDS, SMALL, MOST_BODIES = 20.0, 2**16, 16
"""Seconds that a body may take to arrive, and how many bodies above SMALL bytes are in memory at once."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


def has_left(error: Exception) -> bool:
    """Whether an error only reports that a listener of a job's events has disconnected."""
    return isinstance(error, ExceptionGroup) and error.split(anyio.BrokenResourceError)[1] is None


class Guard:
    """Checks Host (against DNS rebinding), Origin (against cross-site requests), the token and the body.

    Args:
        app: The application behind the guard.
        bodies: Paths whose POST requests have a body. Other bodies are not read.
        hosts: Names of this server, besides localhost and IP addresses.
        token: The secret that routes under /api/ require.
        embedded: Whether a page of another origin, such as a notebook, may show the page in a frame.
    """

    def __init__(
        self, app: ASGIApp, bodies: frozenset[str], hosts: frozenset[str], token: str | None, embedded: bool
    ) -> None:
        self._app, self._token, self._takes_body = app, token, bodies
        self._hosts = {"localhost", *(host.casefold() for host in hosts)}
        self._large_bodies = 0
        self._headers = [
            (b"content-security-policy", (CSP if embedded else f"{CSP}; frame-ancestors 'self'").encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {key.decode("latin-1").casefold(): value.decode("latin-1") for key, value in scope["headers"]}
        api = scope["path"].startswith("/api/")

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [pair for pair in message.get("headers", []) if pair[0] != b"cache-control"]
                cache = (b"cache-control", b"no-store" if api else b"no-cache")
                message = {**message, "headers": [*others, *self._headers, cache]}
            await send(message)

        with contextlib.ExitStack() as until_answered:
            try:
                self._check_host(headers)
                self._check_origin(headers, api)
                if api:
                    self._check_token(headers)
                body = await self._body(scope, headers, receive, until_answered)
            except Refused as refused:
                answer = JSONResponse({"error": str(refused)}, refused.status, refused.headers)
                await answer(scope, receive, send_secured)
                return
            try:
                async with anyio.create_task_group() as tasks:
                    if self._has_body(scope):
                        tasks.start_soon(_cancel_when_left, tasks.cancel_scope, receive)
                    await self._app(scope, _replay(body, receive), send_secured)
                    tasks.cancel_scope.cancel()
            except Exception as error:
                if not has_left(error):
                    raise

    def _check_host(self, headers: dict[str, str]) -> None:
        host, name = headers.get("host", ""), ""
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
        if name.casefold() not in self._hosts and not _is_address(name):
            raise Refused(403, f"The host name '{host[:100]}' is not accepted; --allow-host NAME accepts it.")

    @staticmethod
    def _check_origin(headers: dict[str, str], api: bool) -> None:
        origin = headers.get("origin")
        foreign = origin is not None and origin.casefold().partition("://")[2] != headers.get("host", "").casefold()
        if foreign or (api and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")):
            raise Refused(403, "Requests from other sites are refused.")

    def _check_token(self, headers: dict[str, str]) -> None:
        secret, header = f"Bearer {self._token}".encode(), headers.get("authorization", "").encode()
        if self._token is not None and not hmac.compare_digest(header, secret):
            words = "A token is required: send 'Authorization: Bearer TOKEN', or open the page with '#token=TOKEN'."
            raise Refused(401, words, **{"www-authenticate": "Bearer"})

    def _has_body(self, scope: Scope) -> bool:
        return scope["method"] == "POST" and scope["path"] in self._takes_body

    async def _body(
        self, scope: Scope, headers: dict[str, str], receive: Receive, until_answered: contextlib.ExitStack
    ) -> bytes:
        """The body, if the route takes one; refused if it is too large or too slow."""
        if not self._has_body(scope):
            return b""
        limit = MOST_BYTES if scope["path"] == "/api/images" else MOST_JSON
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read(receive, limit, int(length), until_answered)
        except TimeoutError:
            raise Refused(408, f"The body took over {BODY_SECONDS:.0f} seconds.", connection="close") from None

    async def _read(self, receive: Receive, limit: int, length: int, until_answered: contextlib.ExitStack) -> bytes:
        parts: list[bytes] = []
        size, counted = 0, False
        while True:
            if not counted and max(size, length) > SMALL:
                until_answered.enter_context(self._large())
                counted = True
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "The body was cut short.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return b"".join(parts)

    @contextlib.contextmanager
    def _large(self) -> Iterator[None]:
        """Count a large body while it is in memory."""
        if self._large_bodies >= MOST_BODIES:
            raise Refused(429, "Too many uploads are under way; try again.", **{"retry-after": "1"})
        self._large_bodies += 1
        try:
            yield
        finally:
            self._large_bodies -= 1


def _too_large(limit: int) -> Refused:
    return Refused(413, f"The body is too large; the limit is {limit // 2**20} MB.", connection="close")


async def _cancel_when_left(scope: anyio.CancelScope, receive: Receive) -> None:
    """Cancel the work of a request whose client has disconnected, the only message after the body."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the application the body that was read, then what else arrives: a disconnect."""
    waiting = [body]

    async def receive_body_first() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_body_first


def _is_address(name: str) -> bool:
    """Whether a host is an IP address: unlike a name, nobody can point it elsewhere."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False

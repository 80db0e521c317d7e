"""Who may ask, and how much: checked before anything else sees a request. No class here knows what is asked."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchlight.web.images import MOST_BYTES

MOST_JSON = 2**20
BODY_SECONDS, SMALL, MOST_BODIES = 20.0, 2**16, 16
"""How long a body may take to arrive, and how many larger ones than SMALL bytes are held at once, until answered."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


class Refused(Exception):
    """A request that goes no further: its status, a sentence, and headers."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


class Guard:
    """Checks Host (no DNS rebinding), Origin (no cross-site posts), the token, and the size and time of bodies.

    `hosts` are names that this server goes by, besides localhost and addresses; `embedded` lets a notebook on another
    origin show the page in a frame.
    """

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str] = frozenset(), token: str | None = None, embedded: bool = False
    ) -> None:
        self._app, self._token = app, token
        self._hosts = {"localhost", *(host.casefold() for host in hosts)}
        self._bodies = 0
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

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message.get("headers", []) if pair[0] != b"cache-control"]
                cache = (b"cache-control", b"no-store" if api else b"no-cache")
                message = {**message, "headers": [*given, *self._headers, cache]}
            await send(message)

        with contextlib.ExitStack() as until_answered:
            try:
                self._check_host(headers)
                self._check_origin(headers, api)
                if api:
                    self._check_token(headers)
                body = await self._body(scope, headers, receive, until_answered)
            except Refused as refused:
                await JSONResponse({"error": str(refused)}, refused.status, refused.headers)(scope, receive, dressed)
                return
            await self._app(scope, _replayed(body, receive), dressed)

    def _check_host(self, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        name = _hostname(host)
        if name is None or not (name.casefold() in self._hosts or _is_address(name)):
            raise Refused(403, f"this server does not go by the name '{host[:100]}'; --allow-host NAME allows one")

    @staticmethod
    def _check_origin(headers: dict[str, str], api: bool) -> None:
        origin = headers.get("origin")
        if origin is not None and origin.casefold().partition("://")[2] != headers.get("host", "").casefold():
            raise Refused(403, "requests of other sites are not answered")
        if api and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "requests of other sites are not answered")

    def _check_token(self, headers: dict[str, str]) -> None:
        if self._token is None:
            return
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Refused(
                401,
                "this server wants its token, as 'Authorization: Bearer TOKEN'; the page takes it behind '#token='",
                **{"www-authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, headers: dict[str, str], receive: Receive, held: contextlib.ExitStack) -> bytes:
        """The whole body, if it is small enough and comes in time."""
        if scope["method"] not in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            return b""
        limit = MOST_BYTES if scope["path"] == "/api/images" else MOST_JSON
        told = headers.get("content-length", "0")
        if not (told.isascii() and told.isdigit() and len(told) < 20) or int(told) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read(receive, limit, int(told), held)
        except TimeoutError:
            raise Refused(
                408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds", connection="close"
            ) from None

    async def _read(self, receive: Receive, limit: int, told: int, held: contextlib.ExitStack) -> bytes:
        parts: list[bytes] = []
        size, counted = 0, False
        while True:
            if not counted and max(size, told) > SMALL:
                held.enter_context(self._large())
                counted = True
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the body was cut short")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return b"".join(parts)

    @contextlib.contextmanager
    def _large(self) -> Iterator[None]:
        """One of the large bodies that are held at once."""
        if self._bodies >= MOST_BODIES:
            raise Refused(429, "too many uploads are under way; try again", **{"retry-after": "1"})
        self._bodies += 1
        try:
            yield
        finally:
            self._bodies -= 1


def _too_large(limit: int) -> Refused:
    size = f"{limit // 2**20} MB" if limit >= 2**20 else f"{limit // 2**10} kB"
    return Refused(413, f"the body is too large; at most {size} are taken", connection="close")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then what comes: a disconnect."""
    waiting = [body]

    async def again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return again


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    """Whether a host is an address: no name that somebody could point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

"""What a hostile client does: the server refuses in a sentence, keeps little, writes nothing, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import json
import multiprocessing
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from PIL import ExifTags, Image, PngImagePlugin
from starlette.responses import PlainTextResponse

import patchlight as pl
from patchlight.web.app import BODIES
from patchlight.web.guard import Guard
from patchlight.web.images import ImageStore
from patchlight.web.serve import Server as Here
from patchlight.web.serve import _listen as listen
from patchlight.web.serve import guarded as guarded_app
from patchlight.web.service import ModelService
from tests.web import hostile
from tests.web.server import WEB, Server

REFUSED = {400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 429, 431, 503}
IMAGE = {"Content-Type": "image/png"}
POLICY = {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "base-uri 'none'"}
MARK = "kilroy-7f3a9c"
EVIL = "<img src=x onerror=alert(1)>"


def refused(answer: httpx.Response, *statuses: int) -> None:
    """One of these statuses, with a sentence that is plain text, and the headers of every answer."""
    assert answer.status_code in (statuses or REFUSED), (answer.status_code, answer.text[:300])
    assert answer.headers["content-type"].split(";")[0] == "application/json"
    said = answer.json()
    assert set(said) == {"error"}
    assert said["error"]
    assert "Traceback" not in said["error"]
    assert "site-packages" not in said["error"]
    guarded(answer)


def guarded(answer: httpx.Response) -> None:
    policy = {part.strip() for part in answer.headers["content-security-policy"].split(";")}
    assert policy >= POLICY, policy
    assert not [part for part in policy if "unsafe" in part or "http" in part or "*" in part]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] in ("no-referrer", "same-origin")
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers or "uvicorn" not in answer.headers["server"].lower()


def upload(client: httpx.Client, data: bytes, **headers: str) -> httpx.Response:
    return client.post("/api/images", content=data, headers={**IMAGE, **headers})


def talk(server: Server, data: bytes, wait: float = 10) -> bytes:
    """What the server says to raw bytes, until it closes or is silent for `wait` seconds."""
    with socket.create_connection(server.address, timeout=wait) as line:
        with contextlib.suppress(OSError):
            line.sendall(data)
        return heard(line)


def heard(line: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(OSError):
        while part := line.recv(65536):
            said += part
    return said


def status(said: bytes) -> int:
    assert said.startswith(b"HTTP/1.1 "), said[:200]
    return int(said.split(b" ", 2)[1])


def lines(server: Server, *headers: str, start: str = "GET /api/model HTTP/1.1") -> bytes:
    own = [] if any(h.lower().startswith("host:") for h in headers) else [f"Host: {server.host}:{server.port}"]
    return "\r\n".join([start, *own, *headers, "Connection: close", "", ""]).encode("latin-1")


@pytest.fixture(autouse=True)
def goes_on(server: Server) -> Iterator[None]:
    """The server answers afterwards, and has not grown by more than what the largest picture takes."""
    before, printed = server.memory(), len(server.printed())
    yield
    assert WEB.get(f"{server.url}/api/model", timeout=20).status_code == 200
    assert server.memory() - before < 600
    assert "Traceback" not in server.printed()[printed:]


@pytest.mark.parametrize("name", hostile.bombs())
def test_a_bomb_is_refused_before_it_is_decoded(name: str, client: httpx.Client) -> None:
    data = hostile.bombs()[name]
    assert len(data) < 500_000
    refused(upload(client, data), 400, 413, 415, 422)


def test_a_text_that_unfolds_is_not_kept(client: httpx.Client) -> None:
    assert upload(client, hostile.unfolding()).status_code in (201, 400, 413, 415, 422)


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(client: httpx.Client) -> None:
    """A megabyte of them would keep a decoder busy for an hour, and nothing could stop it."""
    data = hostile.repeating(4000, 2000)
    begin = time.monotonic()
    answer = upload(client, data)
    assert time.monotonic() - begin < 5
    refused(answer, 400)
    assert "scans" in answer.json()["error"]
    assert upload(client, hostile.repeating(200, 10)).status_code == 201


def test_a_gif_of_many_frames_is_its_first(client: httpx.Client) -> None:
    frames = [Image.new("P", (32, 32), i % 256) for i in range(2000)]
    data = hostile.encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    answer = upload(client, data)
    assert answer.status_code == 201
    assert (answer.json()["width"], answer.json()["height"]) == (32, 32)


@pytest.mark.page
def test_many_large_pictures_at_once_take_turns(server: Server) -> None:
    """Twelve pictures of almost as many pixels as are taken, 5 kB each: all at once they would be gigabytes."""
    data = [hostile.flat(6300) + bytes([i]) for i in range(12)]
    statuses: list[int] = []
    peak, before = [0.0], server.memory()

    def one(file: bytes) -> None:
        answer = WEB.post(f"{server.url}/api/images", content=file, headers=IMAGE, timeout=120)
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=one, args=(file,)) for file in data]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        peak[0] = max(peak[0], server.memory() - before)
        time.sleep(0.02)
    assert set(statuses) <= {201, 429, 503}, statuses
    assert 201 in statuses
    assert peak[0] < 1000, f"{peak[0]:.0f} MB"


@pytest.mark.parametrize(("mode", "turned"), [("RGB", 1), ("RGB", 6), ("RGBA", 1)])
def test_the_largest_picture_is_in_memory_twice_at_most(mode: str, turned: int) -> None:
    """Of 40 million pixels, 160 MB each time; the child's largest memory is what it had, and that of decoding."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turned
    data = hostile.encoded(Image.new(mode, (8000, 5000)), "PNG" if mode == "RGBA" else "JPEG", exif=exif)
    store = ImageStore(pl.load("pocket"))
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def decode() -> None:
        torch.set_num_threads(1)  # a fork has none of the threads
        before = psutil.Process().memory_info().rss / 2**20
        image = store.add(data)
        sender.send((image.size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before))

    child = multiprocessing.get_context("fork").Process(target=decode)
    child.start()
    assert receiver.poll(120)
    size, grown = receiver.recv()
    child.join()
    assert size == ((5000, 8000) if turned == 6 else (8000, 5000))
    assert grown < 380, f"{grown:.0f} MB"


@pytest.mark.parametrize("name", hostile.strangers())
def test_what_is_no_picture_is_refused(name: str, client: httpx.Client) -> None:
    refused(upload(client, hostile.strangers()[name]), 400, 411, 413, 415, 422)


def test_a_polyglot_is_its_picture_and_nothing_else(client: httpx.Client) -> None:
    """What comes back was encoded here: none of its bytes but the pixels, and no browser may take it for a script."""
    answer = upload(client, hostile.polyglot())
    if answer.status_code != 201:
        refused(answer, 400, 413, 415, 422)
        return
    back = client.get(f"/api/images/{answer.json()['id']}?whole=1")
    assert back.headers["content-type"] == "image/png"
    assert b"alert" not in back.content
    guarded(back)


def test_the_type_must_be_a_picture(client: httpx.Client) -> None:
    for kind in (
        "text/html",
        "application/json",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
    ):
        refused(upload(client, hostile.picture(), **{"Content-Type": kind}), 415)
    for kind in ("text/plain", "application/xml", "multipart/form-data; boundary=x"):
        answer = client.post("/api/predict", content=b'{"image": "cat"}', headers={"Content-Type": kind})
        refused(answer, 415, 422)


def test_exif_turns_the_picture_and_is_dropped(client: httpx.Client) -> None:
    image = Image.new("RGB", (60, 40), "white")
    image.paste("red", (0, 0, 60, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    exif[0x010E] = MARK
    comment = PngImagePlugin.PngInfo()
    comment.add_text("Comment", MARK)
    for kind, options in (("JPEG", {"quality": 95}), ("PNG", {"pnginfo": comment}), ("WEBP", {"lossless": True})):
        facts = upload(client, hostile.encoded(image, kind, exif=exif, **options)).json()
        assert (facts["width"], facts["height"]) == (40, 60), kind
        for view in ("?whole=1", "", "?fill=blur-tis"):
            data = client.get(f"/api/images/{facts['id']}{view}").content
            back = Image.open(io.BytesIO(data))
            assert not back.getexif()
            assert not getattr(back, "text", {})
            assert MARK.encode() not in data
        whole = Image.open(io.BytesIO(client.get(f"/api/images/{facts['id']}?whole=1").content)).convert("RGB")
        right = whole.getpixel((whole.width - 2, whole.height // 2))
        left = whole.getpixel((1, whole.height // 2))
        assert right[1] < 90, "the red edge was on top, and is turned to the right"
        assert left[1] > 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_upload_is_refused_while_it_comes(server: Server, chunked: bool) -> None:
    """With its length told or not, little of 200 MB is taken; the answer is read even while sending fails."""
    told = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {200 * 2**20}"
    head = lines(server, "Content-Type: image/png", told, start="POST /api/images HTTP/1.1")
    part = bytes(2**16)
    piece = f"{len(part):x}\r\n".encode() + part + b"\r\n" if chunked else part
    before, sent, said = server.memory(), 0, b""
    with socket.create_connection(server.address, timeout=10) as line:
        line.sendall(head)
        with contextlib.suppress(OSError):
            while sent < 200 * 2**20:
                line.sendall(piece)
                sent += len(part)
        said = heard(line)
    assert not said or status(said) in (411, 413)
    assert sent < 100 * 2**20, f"{sent / 2**20:.0f} MB were taken"
    assert server.memory() - before < 100


def test_a_large_json_is_refused(client: httpx.Client, server: Server) -> None:
    body = json.dumps({"image": "cat", "texts": ["x" * 1000] * 30_000})
    refused(client.post("/api/predict", content=body, headers={"Content-Type": "application/json"}), 413)
    for route in ("predict", "images"):  # by its length alone: the answer comes although nothing was sent
        head = lines(
            server, "Content-Type: image/png", "Content-Length: 209715200", start=f"POST /api/{route} HTTP/1.1"
        )
        assert status(talk(server, head)) == 413


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost@evil", "", "[::1"]
)
@pytest.mark.parametrize("path", ["/", "/api/model", "/static/style.css", "/nothing"])
def test_another_host_is_refused(server: Server, host: str, path: str) -> None:
    """A name that an attacker lets point here sees nothing: no DNS rebinding."""
    said = talk(server, lines(server, f"Host: {host.format(port=server.port)}", start=f"GET {path} HTTP/1.1"))
    assert status(said) in (400, 403, 421)
    assert b"pocket" not in said


def test_two_hosts_or_none_are_refused(server: Server) -> None:
    own = f"Host: localhost:{server.port}"
    assert status(talk(server, lines(server, own))) == 200
    for odd in (lines(server, own, "Host: evil.example"), b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"):
        assert status(talk(server, odd)) in (400, 403, 421)


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://localhost:1",
        "http://[evil",
        "http://",
        "",
        "http://127.0.0.1.evil.example:{port}",
    ],
)
def test_another_origin_is_refused(client: httpx.Client, server: Server, origin: str) -> None:
    """Neither a post nor a read from another site, nor the question beforehand whether it may."""
    headers = {"Origin": origin.format(port=server.port)}
    refused(client.post("/api/predict", json={"image": "cat"}, headers=headers), 403)
    refused(upload(client, hostile.picture(), **headers), 403)
    refused(client.delete("/api/jobs/x", headers=headers), 403)
    asked = client.options("/api/predict", headers={**headers, "Access-Control-Request-Method": "POST"})
    refused(asked, 400, 403, 405)
    refused(client.post("/api/predict", json={"image": "cat"}, headers={"Sec-Fetch-Site": "cross-site"}), 403)
    assert client.post("/api/predict", json={"image": "cat"}, headers={"Origin": server.url}).status_code == 200


TRAVERSALS = [
    "/static/../app.py",
    "/static/%2e%2e/app.py",
    "/static/..%2fapp.py",
    "/static/..%5capp.py",
    "/static/....//app.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/%00",
    "/static/style.css%00.png",
    "/static/.",
    "/static/",
    "/static",
    "/static/%ff%fe",
    "/static/" + "a" * 5000,
    "//evil.example/",
    "/api/images/..%2f..%2fetc%2fpasswd",
    "/api/images/../../etc/passwd",
    "/api/images/cat%00",
    "/api/images/CAT",
    "/api/images/%F0%9F%98%80",
    "/api/jobs/..%2f..%2fmodel",
    "/api/jobs/%2e%2e/file",
    "/.git/config",
    "/app.py",
]


@pytest.mark.parametrize("path", TRAVERSALS, ids=lambda path: path[:40])
def test_no_path_leaves_its_folder(server: Server, path: str) -> None:
    said = talk(server, lines(server, start=f"GET {path} HTTP/1.1"))
    assert status(said) in (307, 400, 403, 404, 405, 414, 422, 431)
    assert b"root:" not in said
    assert b"import" not in said
    if status(said) == 307:
        assert b"evil" not in said.partition(b"\r\n\r\n")[0]


HIDDEN = b"GET /api/model HTTP/1.1\r\nHost: x\r\n\r\n"
"""A second request, smuggled behind a first."""
LENGTHS = ("-1", "abc", "1e3", "9" * 40, "+5", "0x10", "1, 2", "")
RAW: dict[str, tuple[list[str], bytes]] = {
    **{f"length {length[:9]}": ([f"Content-Length: {length}"], b"") for length in LENGTHS},
    "two lengths": (["Content-Length: 5", f"Content-Length: {len(HIDDEN)}"], HIDDEN),
    "a length and chunks": ([f"Content-Length: {len(HIDDEN)}", "Transfer-Encoding: chunked"], HIDDEN),
    "many headers": ([f"X-{i}: {i}" for i in range(60_000)], b""),
    "a long header": (["X-Long: " + "a" * 1_000_000], b""),
}


@pytest.mark.parametrize("name", RAW)
def test_odd_heads_are_refused(server: Server, name: str) -> None:
    headers, body = RAW[name]
    said = talk(server, lines(server, *headers, start="POST /api/predict HTTP/1.1") + body, wait=5)
    assert said.count(b"HTTP/1.1 ") <= 1
    assert not said or 400 <= status(said) < 500


@pytest.mark.parametrize("word", ["PUT", "PATCH", "TRACE", "CONNECT", "PROPFIND", "DELETE", "BREW", "get"])
def test_odd_methods_are_refused(server: Server, word: str) -> None:
    assert status(talk(server, lines(server, start=f"{word} /api/predict HTTP/1.1"), wait=5)) in (400, 404, 405, 501)


@pytest.mark.parametrize("noise", [bytes(100), b"\x16\x03\x01\x02\x00\x01" + bytes(100), b"\r\n" * 50, b"GET\r\n\r\n"])
def test_noise_instead_of_http_is_refused(server: Server, noise: bytes) -> None:
    said = talk(server, noise + b"\r\n\r\n", wait=3)
    assert not said or (status(said) == 400 and json.loads(said.partition(b"\r\n\r\n")[2])["error"])


JSONS = {
    "nan": '{"image": "cat", "methods": [{"name": "genatt"}], "wait": NaN}',
    "infinity": '{"image": "cat", "methods": [{"name": "genatt"}], "wait": Infinity}',
    "a huge integer": '{"image": "cat", "target": ' + "9" * 4000 + "}",
    "an integer of many digits": '{"image": "cat", "target": ' + "9" * 100_000 + "}",
    "a huge exponent": '{"image": "cat", "target": 1e999999}',
    "a negative class": '{"image": "cat", "target": -1}',
    "a class that is not there": '{"image": "cat", "target": 100000}',
    "deep lists": '{"image": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "deep objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "no end": '{"image": "cat"',
    "a lone surrogate": '{"image": "\\ud800"}',
    "a zero byte": '{"image": "cat\\u0000"}',
    "a key twice": '{"image": "cat", "image": 3}',
    "a prototype": '{"image": "cat", "__proto__": {"x": 1}}',
    "a path": '{"image": "/etc/passwd"}',
    "an address": '{"image": "http://evil.example/x.png"}',
    "a list": "[]",
    "a string": '"cat"',
    "null": "null",
    "nothing": "",
    "other text": "\u00ff\u00fe",
    "a setting that is no number": '{"image": "cat", "methods": [{"name": "rise", "settings": {"keep": [1]}}]}',
    "markup": json.dumps({"image": EVIL}),
    "markup as a method": json.dumps({"image": "cat", "methods": [{"name": EVIL}]}),
    "markup as a setting": json.dumps({"image": "cat", "methods": [{"name": "genatt", "settings": {EVIL: 1}}]}),
}


@pytest.mark.parametrize("name", JSONS)
@pytest.mark.parametrize("route", ["predict", "explain", "ablate", "measure", "inside", "files"])
def test_odd_json_is_refused_in_a_sentence(client: httpx.Client, route: str, name: str) -> None:
    answer = client.post(
        f"/api/{route}",
        content=JSONS[name].encode("utf-8", "surrogatepass"),
        headers={"Content-Type": "application/json"},
    )
    refused(answer, 400, 404, 413, 422)


def test_a_setting_that_is_no_number_is_reported_in_a_sentence(client: httpx.Client) -> None:
    """JSON has no NaN, but many write it."""
    for value in ("NaN", "Infinity", "1e400", "-1", '"x"'):
        body = f'{{"image": "cat", "methods": [{{"name": "rise", "settings": {{"keep": {value}}}}}], "wait": 30}}'
        answer = client.post("/api/explain", content=body, headers={"Content-Type": "application/json"})
        if answer.status_code == 200:
            assert "keep" in answer.json()["failures"]["rise"], value
        else:
            refused(answer, 400, 422)


@pytest.mark.parametrize(
    "query",
    ["side=31", "side=1025", "side=1e9", "side=NaN", "side=" + "9" * 5000, "fill=road", "fill=%3Cimg%3E", "side=-1"],
)
def test_odd_queries_are_refused(client: httpx.Client, query: str) -> None:
    refused(client.get(f"/api/images/cat?{query}"), 400, 414, 422)


def test_who_is_slow_does_not_keep_others_waiting(server: Server) -> None:
    """Twenty uploads that dribble, and two hundred heads that never end: others are answered meanwhile."""
    head = lines(server, "Content-Type: image/png", "Content-Length: 100000", start="POST /api/images HTTP/1.1")
    over = threading.Event()

    def dribble() -> None:
        with contextlib.suppress(OSError), socket.create_connection(server.address, timeout=10) as line:
            line.sendall(head)
            while not over.wait(0.2):
                line.sendall(b"\x89")

    threads = [threading.Thread(target=dribble) for _ in range(20)]
    for thread in threads:
        thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(over.set)
        for _ in range(200):
            line = stack.enter_context(socket.create_connection(server.address, timeout=10))
            line.sendall(b"GET /api/model HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: b\r\n")
        body = {"image": "cat", "methods": [{"name": "genatt"}], "wait": 20}
        assert WEB.post(f"{server.url}/api/explain", json=body, timeout=20).status_code == 200
    for thread in threads:
        thread.join()


@pytest.mark.page
@pytest.mark.parametrize("what", ["head", "second head", "upload", "json"])
def test_who_never_ends_a_request_is_let_go(server: Server, what: str) -> None:
    """Bytes go on dribbling in, and still the line is closed within a minute, with 408 if anything is said."""
    path = "/api/predict" if what == "json" else "/api/images"
    head = lines(server, "Content-Type: image/png", "Content-Length: 100000", start=f"POST {path} HTTP/1.1")
    if "head" in what:
        head = f"GET /api/model HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-a: ".encode()
    begin = time.monotonic()
    with socket.create_connection(server.address, timeout=1) as line:
        if what == "second head":
            line.sendall(f"GET /static/none HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
            first = line.recv(65536)
            while b"}" not in first:
                first += line.recv(65536)
            assert status(first) == 404
        line.sendall(head)
        said = b""
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin < 60:
                line.sendall(b"a")
                with contextlib.suppress(TimeoutError):
                    part = line.recv(65536)
                    said += part
                    if not part:
                        break
    assert time.monotonic() - begin < 60, "the line is still open"
    assert not said or status(said) in (400, 408, 415)


def test_nothing_of_an_upload_is_on_disk_or_printed(client: httpx.Client, server: Server, tmp_path: Path) -> None:
    """Its bytes are looked for in every file of the server's folder, its temporary files and its output."""
    comment = PngImagePlugin.PngInfo()
    comment.add_text("Comment", MARK)
    data = hostile.picture(200, pnginfo=comment, compress_level=0)
    before = set(server.temporary.rglob("*"))  # what libraries put there when they are imported
    image = upload(client, data).json()["id"]
    for kind in ("png", "arrays", "report"):
        body = {"image": image, "methods": [{"name": "genatt"}], "wait": 60, "kind": kind, "name": MARK}
        job = client.post("/api/files", json=body).json()
        assert job["state"] == "done", job
        assert client.get(job["file"]).status_code == 200
    refused(upload(client, data[:-30_000] + MARK.encode()), 400, 422)
    assert not server.written()
    assert set(server.temporary.rglob("*")) <= before
    assert {file.name for file in server.log.parent.iterdir()} == {"log.txt", "tmp"}
    printed = server.printed()
    assert MARK not in printed
    assert image not in printed


def test_headers_are_on_every_answer(client: httpx.Client) -> None:
    for path in ("/", "/api/model", "/api/methods", "/api/openapi.json", "/api/images/cat"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["cache-control"] == ("no-store" if "api" in path else "no-cache")
        guarded(answer)
    gone = ("images/gone", "jobs/gone", "jobs/gone/events", "jobs/gone/file", "nothing")
    for path in (*(f"/api/{path}" for path in gone), "/static/nothing.js", "/nothing", "/docs", "/redoc"):
        refused(client.get(path), 404)
    refused(client.post("/api/model"), 405)
    assert client.head("/").status_code == 200
    assert int(client.head("/static/style.css").headers["content-length"]) > 0


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """A server in this process that wants a token."""
    here = Here(ModelService(pl.load("pocket")), token="correct-horse")
    here.start()
    yield f"http://127.0.0.1:{here.port}"
    here.stop()


def test_a_large_body_counts_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its turn is in memory as much as what still arrives."""
    monkeypatch.setattr("patchlight.web.guard.MOST_BODIES", 2)
    go = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await PlainTextResponse("done")(scope, receive, send)

    async def statuses() -> list[int]:
        line = httpx.ASGITransport(Guard(slow, BODIES, frozenset(), None, False))
        async with httpx.AsyncClient(transport=line, base_url="http://localhost") as client:

            async def one(size: int) -> int:
                return (await client.post("/api/images", content=bytes(size), headers=IMAGE)).status_code

            asked = [asyncio.create_task(one(size)) for size in (100_000, 100_000, 100_000, 100)]
            await asyncio.wait([asked[2]])
            go.set()
            return [*await asyncio.gather(*asked), await one(100_000)]

    assert asyncio.run(statuses()) == [200, 200, 429, 200, 200]


def test_bodies_are_read_after_the_token_and_only_where_one_is_taken() -> None:
    """Otherwise anybody could fill the room for large bodies, and block uploads without the token."""
    read: list[str] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("done")(scope, receive, send)

    async def ask(path: str, method: str = "POST", **headers: str) -> int:
        statuses: list[int] = []

        waiting = [{"type": "http.request", "body": bytes(100), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not waiting:
                await asyncio.Event().wait()
            read.append(path)
            return waiting.pop()

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        pairs = [(key.encode(), value.encode()) for key, value in {"host": "localhost", **headers}.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs}
        await Guard(answer, BODIES, frozenset(), "correct-horse", False)(scope, receive, send)
        return statuses[0]

    assert "/api/images" in BODIES
    for path in BODIES:
        assert asyncio.run(ask(path)) == 401
    for path in ("/", "/static/page.js", "/nothing"):
        assert asyncio.run(ask(path)) == 200, "the application answers, without a body"
    right = {"authorization": "Bearer correct-horse"}
    for path, method in (
        ("/api/model", "POST"),
        ("/api/nothing", "POST"),
        ("/api/images", "PUT"),
        ("/api/jobs/x", "DELETE"),
    ):
        assert asyncio.run(ask(path, method, **right)) == 200
    assert read == []
    assert asyncio.run(ask("/api/images", **right)) == 200
    assert read == ["/api/images"]


@pytest.mark.parametrize("wait", [0, 20])
def test_work_of_a_client_that_left_is_dropped(wait: int) -> None:
    """A job whose id was not sent ends; one that the client knows goes on."""
    body = {"image": "cat", "methods": [{"name": "tis"}], "wait": wait}
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def state() -> str:
        service = ModelService(pl.load("pocket"))

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            while not (jobs := list(service.jobs.values())) or jobs[0].status.state != "running":
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/api/explain", "headers": headers, "query_string": b""}
        await guarded_app(service)(scope, receive, send)
        (job,) = service.jobs.values()
        if wait:
            await asyncio.wait([job.done], timeout=60)
        state = job.status.state
        service.close()
        return state

    assert asyncio.run(state()) in (("cancelled",) if wait else ("waiting", "running"))


def test_who_reads_no_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an answer is still written or all are: what waits to be read holds no line for ever."""
    monkeypatch.setattr("patchlight.web.serve.READ_SECONDS", 0.5)
    monkeypatch.setattr("patchlight.web.serve.HEAD_SECONDS", 0.5)
    here = Here(ModelService(pl.load("pocket")))
    here._server.config.timeout_keep_alive = 1
    here.start()
    with contextlib.ExitStack() as stack:
        for path, times in (("/api/images/cat?side=1024", 30), ("/static/none", 1)):
            line = stack.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", here.port))
            line.sendall(times * f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        until = time.monotonic() + 20
        time.sleep(1)
        while (left := len(here._server.server_state.connections)) and time.monotonic() < until:
            time.sleep(0.1)
    here.stop()
    assert left == 0


def test_without_the_token_nothing_is_revealed(closed: str, capfd: pytest.CaptureFixture[str]) -> None:
    routes = ("/api/model", "/api/methods", "/api/images/cat", "/api/jobs/x", "/api/jobs/x/events", "/api/openapi.json")
    words = [
        "Bearer",
        "Bearer wrong",
        "Bearer correct-hors",
        "Bearer correct-horse2",
        "correct-horse",
        "Basic correct-horse",
    ]
    wrong: list[dict[str, str]] = [{}, *({"Authorization": word} for word in words)]
    with httpx.Client(base_url=closed, verify=False, trust_env=False) as client:
        for headers in wrong:
            for path in routes:
                refused(client.get(path, headers=headers), 401)
            refused(client.post("/api/predict", json={"image": "cat"}, headers=headers), 401)
            refused(upload(client, hostile.picture(), **headers), 401)
        refused(client.get("/api/model", headers={"Authorization": "Bearer \u00e9".encode("latin-1")}), 401)
        refused(client.get("/api/model?token=correct-horse"), 401)
        assert client.get("/").status_code == 200, "the page itself holds nothing"
        right = {"Authorization": "Bearer correct-horse"}
        assert client.get("/api/model", headers=right).status_code == 200
        assert client.post("/api/predict", json={"image": "cat"}, headers=right).status_code == 200
    printed = capfd.readouterr()
    assert "horse" not in printed.out + printed.err


@pytest.mark.parametrize("host", ["no such host", 300 * "\u00e9", "\udcff"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(pl.PatchlightError, match="Cannot listen on"):
        listen(host, 0)


def test_tokens_are_compared_in_constant_time(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `hmac.compare_digest`, whatever was given."""
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.extend([a, b])
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    WEB.get(f"{closed}/api/model", headers={"Authorization": "Bearer wrong"})
    assert [part for part in compared if part.endswith(b"wrong")]
    assert [part for part in compared if part.endswith(b"correct-horse")]


def test_two_hundred_listeners_and_one_connection_too_many(server: Server) -> None:
    """Who listens to a job takes no place of others; a connection beyond the limit is refused in a sentence."""
    body = {"image": "cat", "methods": [{"name": "tis"}]}
    job = WEB.post(f"{server.url}/api/explain", json=body, timeout=20).json()["id"]
    request = lines(server, start=f"GET /api/jobs/{job}/events HTTP/1.1")
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_connection((server.host, server.port), 10)) for _ in range(200)]
        for each in listeners:
            each.sendall(request)
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in listeners)
        begin = time.monotonic()
        assert WEB.post(f"{server.url}/api/predict", json={"image": "dog"}, timeout=20).status_code == 200
        assert time.monotonic() - begin < 10
        more = [stack.enter_context(socket.create_connection((server.host, server.port), 10)) for _ in range(60)]
        more[-1].sendall(lines(server, start="GET /api/model HTTP/1.1"))
        said = b"".join(iter(lambda: more[-1].recv(65536), b""))
        assert status(said) == 503
        assert "connections are open" in json.loads(said.partition(b"\r\n\r\n")[2])["error"]

"""`pl.show`: the page in a notebook, on a server in a thread of this process that nobody else can ask."""

from __future__ import annotations

import atexit
import hashlib
import json
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from PIL import Image

from patchlight.anatomy.load import wrap
from patchlight.core.errors import NoClassifier, PatchlightError, check_keywords, integer
from patchlight.core.images import PICTURES, Picture, open_image
from patchlight.core.targets import Target, resolve_targets
from patchlight.methods.requests import check_supported, resolve
from patchlight.web import check_extra

if TYPE_CHECKING:
    from torch import nn

    from patchlight.anatomy.opened import Anatomy
    from patchlight.web.serve import Server

HEIGHT = 900
"""Pixels of the page in a notebook."""
_OPEN: dict[int, tuple[Any, Server]] = {}
"""The servers by the identity of the model that was given, with that model, so that no other takes its identity."""
_LOCK = threading.Lock()


class View:
    """The page of one model: `url` is its address, which a notebook shows as a frame.

    Views of one model share a server; `close` ends it, and so does the end of the process.
    """

    def __init__(self, server: Server, url: str, height: int) -> None:
        self._server, self.url, self.height = server, url, height

    def close(self) -> None:
        """End the server; the page of every view of this model answers no more."""
        with _LOCK:
            for key in [key for key, (_, server) in _OPEN.items() if server is self._server]:
                del _OPEN[key]
        self._server.stop()

    def wait(self) -> None:
        """Serve until Ctrl-C, where a program would otherwise be over."""
        try:
            while self._server.running:
                threading.Event().wait(0.2)
        except KeyboardInterrupt:
            self.close()

    def __repr__(self) -> str:
        return f"<View of {self._server.service.vit.name} at {self.url}>"

    def _repr_html_(self) -> str:
        title = escape(f"Patchlight: {self._server.service.vit.name}")
        return (
            f'<iframe src="{escape(self.url)}" title="{title}" width="100%" height="{self.height}" '
            'style="border:0" allow="clipboard-read; clipboard-write; fullscreen"></iframe>'
        )


@check_keywords
def show(
    vit: Anatomy | nn.Module,
    image: Picture | None = None,
    methods: str | Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    target: Target = None,
    *,
    seed: int = 0,
    height: int = HEIGHT,
    port: int = 0,
) -> View:
    """The page about a model: in a notebook as a frame below the cell, elsewhere by its address, which is printed.

    `image`: a path, a PIL image, or the name of a bundled photograph ("cat"); on the page another can be chosen.
    `methods`: a name, a list of names, or a dict of names and settings. `target`: a class index or label name, or
    (a, b) for a against b. The server runs in a thread of this process, one for each model, on 127.0.0.1 at a free
    port (or `port`), and answers only who has the token in the address; `close` ends it.

    >>> pl.show(vit, "cat.jpg", ["genatt", "rollout"])                          # doctest: +SKIP
    """
    check_extra()
    height, seed = integer("height", height, 100, 20_000), integer("seed", seed, 0, 2**31 - 1)
    port = integer("port", port, 0, 65_535)
    if image is not None and not isinstance(image, PICTURES):
        kind = type(image).__name__
        raise PatchlightError(f"image is a {kind}; give a path, a PIL image or the name of a bundled photograph")
    opened = _opened(vit)
    state = [*_asked(opened, methods, target), *([("seed", str(seed))] if seed else [])]
    picture = _bundled_or_opened(image)
    server = _server(vit, opened, port)
    if picture is not None:
        state.insert(0, ("image", picture if isinstance(picture, str) else _kept(server, picture)))
    view = View(server, f"{server.url}&{urlencode(state, safe=',')}".rstrip("&"), height)
    if not _in_notebook():
        print(f"{opened.name} is at {view.url}")
    return view


def _asked(vit: Anatomy, methods: Any, target: Target) -> list[tuple[str, str]]:
    """The class and the methods as the page's address has them (static/state.js), each checked on this model."""
    state = []
    found = resolve_targets(target, 1, vit.outcomes, vit.labels)
    if found is not None:
        if found.count != 1:
            raise PatchlightError(f"target {target!r} names {found.count} classes; the page asks about one, or (a, b)")
        state.append(("target", str(int(found.index[0, 0]))))
        if found.against is not None:
            state.append(("against", str(int(found.against[0, 0]))))
    named = _named(methods)
    for name, settings in named.items():
        check_supported(resolve(name, settings), vit)
    if named:
        state.append(("methods", ",".join(named)))
    state += [("set", f"{name}.{key}={json.dumps(value)}") for name, own in named.items() for key, value in own.items()]
    return state


def _named(methods: Any) -> dict[str, dict[str, Any]]:
    """Settings by the names of the methods."""
    if methods is None:
        return {}
    if isinstance(methods, str):
        return {methods: {}}
    if isinstance(methods, Mapping) and all(isinstance(own, Mapping) for own in methods.values()):
        if any("method" in own for own in methods.values()):
            raise PatchlightError("the page calls methods by their own names; leave the setting 'method' out")
        return {str(name): dict(own) for name, own in methods.items()}
    if isinstance(methods, Sequence) and all(isinstance(name, str) for name in methods):
        return {name: {} for name in methods}
    raise PatchlightError(
        f"methods {methods!r} are none; give a name, a list of names, or a dict of names and settings"
    )


def _opened(vit: Anatomy | nn.Module) -> Anatomy:
    try:
        return wrap(vit)
    except NoClassifier as error:
        from patchlight.web.service import with_default_texts

        return with_default_texts(error)


def _bundled_or_opened(image: Picture | None) -> str | Image.Image | None:
    """The name of a bundled photograph, or the picture; a file of that name comes first."""
    from patchlight.zoo.pocket import PHOTOS

    if image is None:
        return None
    if isinstance(image, str) and not Path(image).suffix and not Path(image).exists():
        names = sorted(photo.stem for photo in PHOTOS.glob("*.jpg"))
        if image in names:
            return image
        raise PatchlightError(f"no image at '{image}', and no bundled photograph is called so: {', '.join(names)}")
    return open_image(image)


def _kept(server: Server, picture: Image.Image) -> str:
    """The id of a picture that the server is given without a way over the wire."""
    name = "s-" + hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).hexdigest()[:40]
    return server.service.images.keep(name, picture).id


def _server(given: Any, vit: Anatomy, port: int) -> Server:
    """The server of a model, begun unless it runs already; what it computed before is not shown any more."""
    from patchlight.web.serve import Server
    from patchlight.web.service import ModelService

    with _LOCK:
        _, server = _OPEN.get(id(given), (None, None))
        if server is not None and server.running and port in (0, server.port):
            server.service.forget()
            return server
        if server is not None:
            server.stop()
        server = Server(ModelService(vit), port=port, token=secrets.token_urlsafe(24), embedded=True)
        server.start()
        _OPEN[id(given)] = given, server
        return server


@atexit.register
def close_all() -> None:
    """End every server that `show` began."""
    with _LOCK:
        ended = [server for _, server in _OPEN.values()]
        _OPEN.clear()
    for server in ended:
        server.stop()


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")

"""`pl.show`: the page in a notebook, from a server in a thread of this process."""

from __future__ import annotations

import atexit
import hashlib
import json
import secrets
import threading
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from PIL import Image

from patchlight.anatomy.load import wrap
from patchlight.core.display import in_notebook
from patchlight.core.errors import NoClassifier, PatchlightError, check_keywords, integer
from patchlight.core.images import PICTURES, Picture, open_image
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.targets import Target, resolve_targets
from patchlight.methods.requests import check_contrast, check_supported, resolve
from patchlight.web import check_extra

if TYPE_CHECKING:
    from torch import nn

    from patchlight.anatomy.opened import Anatomy
    from patchlight.web.serve import Server

_OPEN: dict[int, tuple[Any, Server]] = {}
"""The servers by the id of the model that was passed; keeping the model makes sure that its id is not reused."""
_LOCK = threading.Lock()


class View:
    """The page of one model at `url`, which a notebook shows as a frame.

    Views of one model share a server, which runs until `close` or the end of the process.
    """

    def __init__(self, server: Server, url: str, height: int) -> None:
        self._server, self.url, self.height = server, url, height

    def close(self) -> None:
        """Stop the server; this ends all views of the model."""
        with _LOCK:
            for key in [key for key, (_, server) in _OPEN.items() if server is self._server]:
                del _OPEN[key]
        self._server.stop()

    def wait(self) -> None:
        """Serve until Ctrl-C, to keep a script running."""
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
    methods: Selection | None = None,
    target: Target = None,
    *,
    seed: int = 0,
    height: int = 900,
    port: int = 0,
) -> View:
    """Open the local web page of a model: in a notebook as a frame, elsewhere by its address, which is printed.

    The server runs in a thread of this process, one per model, on 127.0.0.1, and requires the token in the address.

    Args:
        vit: The model.
        image: A path, a PIL image, or the name of a bundled photograph ("cat"). The page can load others.
        methods: A name, a list of names, or a dict of names and settings. The first one is shown large.
        target: A class index or label, or a pair (a, b) for a against b; default the prediction.
        seed: The random seed.
        height: Height of the frame in pixels.
        port: The port; 0 takes a free one.

    Returns:
        The view; its `close` stops the server.

    Example:
        >>> pl.show(vit, "cat.jpg", ["auto", "rollout"])                        # doctest: +SKIP
    """
    check_extra()
    height, seed = integer("height", height, 100, 20_000), integer("seed", seed, 0, 2**31 - 1)
    port = integer("port", port, 0, 65_535)
    if image is not None and not isinstance(image, PICTURES):
        raise PatchlightError(f"image is a {type(image).__name__}; give a path, a PIL image or a bundled photograph.")
    opened = _open(vit)
    state = [*_link_state(opened, methods, target), *([("seed", str(seed))] if seed else [])]
    picture = _bundled_or_opened(image)
    server = _server(vit, opened, port)
    if picture is not None:
        state.insert(0, ("image", picture if isinstance(picture, str) else _keep(server, picture)))
    view = View(server, f"{server.url}&{urlencode(state, safe=',')}".rstrip("&"), height)
    if not in_notebook():
        print(f"{opened.name}: {view.url}")
    return view


def _link_state(vit: Anatomy, methods: Selection | None, target: Target) -> list[tuple[str, str]]:
    """The class and the methods in the form of the page's link (static/state.js), checked for this model."""
    state = []
    targets = resolve_targets(target, 1, vit.outcomes, vit.labels)
    if targets is not None:
        if targets.count != 1:
            raise PatchlightError(f"target {target!r} names {targets.count} classes; give one, or a pair (a, b).")
        state.append(("target", str(int(targets.index[0, 0]))))
        if targets.against is not None:
            state.append(("against", str(int(targets.against[0, 0]))))
    named = [] if methods is None else resolve_all(methods, {}, tuple, "method", lambda *pair: pair)
    if any("method" in settings for _, settings in named):
        raise PatchlightError("The page calls methods by their names; leave out the setting 'method'.")
    for name, settings in named:
        request = resolve(name, settings)
        check_supported(request, vit)
        check_contrast(request, targets, vit)
    if named:
        state.append(("methods", ",".join(name for name, _ in named)))
    for name, settings in named:
        state += [("set", f"{name}.{key}={json.dumps(value)}") for key, value in settings.items()]
    return state


def _open(vit: Anatomy | nn.Module) -> Anatomy:
    try:
        return wrap(vit)
    except NoClassifier as error:
        from patchlight.web.service import with_default_texts

        return with_default_texts(error)


def _bundled_or_opened(image: Picture | None) -> str | Image.Image | None:
    """The name of a bundled photograph, or the picture; a file of that name takes precedence."""
    from patchlight.zoo.pocket import PHOTOS

    if image is None:
        return None
    if isinstance(image, str) and not Path(image).suffix and not Path(image).exists():
        names = sorted(photo.stem for photo in PHOTOS.glob("*.jpg"))
        if image in names:
            return image
        raise PatchlightError(f"No image at '{image}', and no bundled photograph has that name: {', '.join(names)}.")
    return open_image(image)


def _keep(server: Server, picture: Image.Image) -> str:
    """Hand a picture to the server; returns its id."""
    name = "s-" + hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).hexdigest()[:40]
    return server.service.images.keep(name, picture).id


def _server(model: Any, vit: Anatomy, port: int) -> Server:
    """The server of a model, started unless it runs; its caches are cleared."""
    from patchlight.web.serve import Server
    from patchlight.web.service import ModelService

    with _LOCK:
        _, server = _OPEN.get(id(model), (None, None))
        if server is not None and server.running and port in (0, server.port):
            server.service.forget()
            return server
        if server is not None:
            server.stop()
        server = Server(ModelService(vit), port=port, token=secrets.token_urlsafe(24), embedded=True)
        server.start()
        _OPEN[id(model)] = model, server
        return server


@atexit.register
def close_all() -> None:
    """Stop every server that `show` started."""
    with _LOCK:
        ended = [server for _, server in _OPEN.values()]
        _OPEN.clear()
    for server in ended:
        server.stop()

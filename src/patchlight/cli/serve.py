"""`patchlight serve`: the web page and its API."""

from __future__ import annotations

import os
import shlex
import threading
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from patchlight.cli.common import say
from patchlight.cli.options import ModelOptions, command, option_words
from patchlight.core.errors import NoClassifier, PatchlightError
from patchlight.web import check_extra


@command
def serve(
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    token: Annotated[str | None, typer.Option(envvar="PATCHLIGHT_TOKEN")] = None,
    allow_host: list[str] | None = None,
    open_it: bool = False,
    model: ModelOptions,
) -> None:
    """Start the interactive web page: maps of an image, patches to hide, and a faithfulness test."""
    check_extra()
    if token is not None and not token.strip():
        raise PatchlightError("--token is empty; give a secret, or 'new' to create one")
    if token is not None and (token != token.strip() or not (token.isascii() and token.isprintable())):
        raise PatchlightError("--token must be printable ASCII without spaces around it; 'new' creates one")
    model.check()
    say(f"Loading {model.model} …")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # queues run at the same time, so no thread may spin
    from patchlight.web.serve import Server, is_loopback
    from patchlight.web.service import ModelService, with_default_texts

    try:
        vit = model.load()
    except NoClassifier as error:
        vit = with_default_texts(error)
        model = replace(model, text=list(vit.labels or ()))
    service = ModelService(vit, in_python(model), in_shell(model))
    if token == "new":
        import secrets

        token = secrets.token_urlsafe(24)
    server = Server(service, host, port, token, frozenset(allow_host or ()))
    if not is_loopback(host):
        access = "with the token" if token else "without a token (--token new creates one)"
        say(f"warning: listening on {host}: other machines can use this page {access}")
    say(f"{vit.name} is ready at {server.url}  (Ctrl-C stops the server)")
    if open_it:
        threading.Timer(0.5, webbrowser.open, [server.url]).start()
    server.run()


def in_python(model: ModelOptions) -> str:
    """The line that opens the same model in Python.

    >>> in_python(ModelOptions(stage=2))
    "pl.load('pocket', stage=2)"
    """
    options = {key: getattr(model, key) for key in ("weights", "labels", "stage", "preprocess")}
    options |= {"sigmoid": model.sigmoid or None, "pretrained": False if model.no_pretrained else None}
    options |= {"device": None if model.device == "cpu" else model.device}
    options |= {"texts": model.text or None, "template": model.template}
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    words = [repr(model.model), *(f"{key}={value!r}" for key, value in plain.items() if value is not None)]
    if model.similar_to:
        words.append(f"head=pl.heads.Similar({[str(path) for path in model.similar_to]!r})")
    return f"pl.load({', '.join(words)})"


def in_shell(model: ModelOptions) -> str:
    """The options that open the same model on the command line.

    >>> in_shell(ModelOptions(template="a {}", text=["cat"]))
    "--model pocket --text cat --template 'a {}'"
    """
    return shlex.join(["--model", model.model, *option_words(replace(model, model="pocket", plugin=None))])

"""`patchlight serve`: the page, and the API beneath it."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.cli.common import progress, say
from patchlight.cli.options import ModelOptions, command, option_words
from patchlight.core.errors import NoClassifier, PatchlightError
from patchlight.web import check_extra


@command
def serve(
    *,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="A secret that the page and the API then want; 'new' draws one.", envvar="PATCHLIGHT_TOKEN"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that this server is reached by, behind a proxy say; repeatable.", metavar="NAME"),
    ] = None,
    model: ModelOptions,
) -> None:
    """Open a page where an image can be asked about: maps, patches to take away, and whether the maps are true."""
    check_extra()
    if token is not None and not token.strip():
        raise PatchlightError("the token is empty; give a secret, or 'new', which draws one")
    if token is not None and (token != token.strip() or not (token.isascii() and token.isprintable())):
        raise PatchlightError(
            "the token cannot be sent in a header: give printable ASCII without space around it, or 'new', which "
            "draws one"
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # lanes compute at once, and must not wait busily
    with progress(f"loading {model.model}"):
        from patchlight.web.serve import Server, is_loopback
        from patchlight.web.service import ModelService, with_default_texts

        try:
            vit = model.load()
        except NoClassifier as error:
            vit = with_default_texts(error)
            model = replace(model, text=list(vit.labels or ()))
        if not is_loopback(host):  # where this machine's folders are is nobody else's business
            names: dict[str, Any] = {
                key: Path(path.name) for key in ("weights", "labels", "preprocess") if (path := getattr(model, key))
            }
            model = replace(model, **names)
        service = ModelService(vit, in_python(model), in_shell(model))
    if token == "new":
        import secrets

        token = secrets.token_urlsafe(24)
    server = Server(service, host, port, token, frozenset(allow_host or ()))
    if not is_loopback(host):
        guard = "who has the token" if token else "everybody there, without a token (--token new draws one)"
        say(f"warning: listening on {host}: other machines can reach this page; it answers {guard}")
    say(f"{vit.name} is at {server.url}  (Ctrl-C stops it)")
    server.run()


def in_python(model: ModelOptions) -> str:
    """The line that opens the same model in Python.

    >>> in_python(ModelOptions(weights=Path("w.safetensors")))
    "pl.load('pocket', weights='w.safetensors')"
    """
    given = {key: getattr(model, key) for key in ("weights", "labels", "stage", "preprocess")}
    given |= {"sigmoid": model.sigmoid or None, "pretrained": False if model.no_pretrained else None}
    given |= {"device": None if model.device == "cpu" else model.device}
    given |= {"texts": model.text or None, "template": model.template}
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    words = [repr(model.model), *(f"{key}={value!r}" for key, value in plain.items() if value is not None)]
    if model.similar_to:
        words.append(f"head=pl.heads.Similar({[str(path) for path in model.similar_to]!r})")
    return f"pl.load({', '.join(words)})"


def in_shell(model: ModelOptions) -> str:
    """The options that open the same model on the command line.

    >>> in_shell(ModelOptions(weights=Path("my w.safetensors")))
    "--model pocket --weights 'my w.safetensors'"
    """
    return shlex.join(["--model", model.model, *option_words(replace(model, model="pocket", plugin=None))])

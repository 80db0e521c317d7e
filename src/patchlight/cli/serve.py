"""`patchlight serve`: the page, and the API beneath it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.cli.common import (
    Debug,
    Device,
    Labels,
    Model,
    NoPretrained,
    Plugin,
    Preprocessed,
    Sigmoid,
    SimilarTo,
    Stage,
    Template,
    Text,
    Weights,
    answering,
    asked_by,
    load_model,
    of_model,
    progress,
    say,
)
from patchlight.core.errors import NoClassifier, PatchlightError
from patchlight.web import check_extra


def serve(
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
    model: Model = "pocket",
    weights: Weights = None,
    labels: Labels = None,
    stage: Stage = None,
    preprocess: Preprocessed = None,
    sigmoid: Sigmoid = False,
    no_pretrained: NoPretrained = False,
    text: Text = None,
    template: Template = None,
    similar_to: SimilarTo = None,
    plugin: Plugin = None,
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Open a page where an image can be asked about: maps, patches to take away, and whether the maps are true."""
    with answering(as_json=False, debug=debug):
        check_extra()
        if token is not None and not token.strip():
            raise PatchlightError("the token is empty; give a secret, or 'new', which draws one")
        if token is not None and (token != token.strip() or not (token.isascii() and token.isprintable())):
            raise PatchlightError(
                "the token cannot be sent in a header: give printable ASCII without space around it, or 'new', which "
                "draws one"
            )
        asked = asked_by(text, template, similar_to)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # lanes compute at once, and must not wait busily
        with progress(f"loading {model}"):
            from patchlight.web.serve import Server, is_loopback
            from patchlight.web.site import Site, begun_with_sentences

            try:
                vit = load_model(
                    model, weights, labels, device, stage, asked, **of_model(preprocess, sigmoid, no_pretrained)
                )
            except NoClassifier as found:
                vit = begun_with_sentences(found)
                asked["texts"] = vit.labels
            said: dict[str, Any] = {"weights": weights, "labels": labels, "stage": stage, "preprocess": preprocess}
            said |= {"sigmoid": sigmoid, "pretrained": not no_pretrained, "device": device}
            if not is_loopback(host):  # where this machine's folders are is nobody else's business
                said = {key: Path(value.name) if isinstance(value, Path) else value for key, value in said.items()}
            site = Site(vit, in_python(model, said, asked), in_shell(model, said, asked))
        if token == "new":
            import secrets

            token = secrets.token_urlsafe(24)
        server = Server(site, host, port, token, frozenset(allow_host or ()))
        if not is_loopback(host):
            guard = "who has the token" if token else "everybody there, without a token (--token new draws one)"
            say(f"warning: listening on {host}: other machines can reach this page; it answers {guard}")
        say(f"{vit.name} is at {server.url}  (Ctrl-C stops it)")
        server.run()


def in_python(model: str, said: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The line that opens the same model in Python.

    >>> in_python("pocket", {"device": "cpu", "weights": Path("w.safetensors")}, {})
    "pl.load('pocket', weights='w.safetensors')"
    """
    usual = {"device": "cpu", "pretrained": True, "sigmoid": False, "stage": None}
    given = {k: str(v) if isinstance(v, Path) else v for k, v in said.items() if v is not None and v != usual.get(k)}
    if asked.get("texts"):
        given["texts"] = list(asked["texts"])
        given |= {} if asked["template"] == "{}" else {"template": asked["template"]}
    words = [repr(model), *(f"{key}={value!r}" for key, value in given.items())]
    if asked.get("similar_to"):
        words.append(f"head=pl.heads.Similar({[str(path) for path in asked['similar_to']]!r})")
    return f"pl.load({', '.join(words)})"


def in_shell(model: str, said: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The options that open the same model on the command line.

    >>> in_shell("pocket", {"device": "cpu", "weights": Path("my w.safetensors")}, {})
    "--model pocket --weights 'my w.safetensors'"
    """
    words = ["--model", model]
    for key in ("weights", "labels", "stage", "preprocess"):
        words += [] if said.get(key) is None else [f"--{key}", str(said[key])]
    words += ["--sigmoid"] if said.get("sigmoid") else []
    words += [] if said.get("pretrained", True) else ["--no-pretrained"]
    words += [] if said.get("device", "cpu") == "cpu" else ["--device", str(said["device"])]
    for text in asked.get("texts", ()):
        words += ["--text", text]
    words += [] if asked.get("template", "{}") == "{}" else ["--template", asked["template"]]
    for path in asked.get("similar_to", ()):
        words += ["--similar-to", str(path)]
    return shlex.join(words)

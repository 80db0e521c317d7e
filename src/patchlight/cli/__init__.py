"""The command line. Torch and the models are imported inside the commands, so that `--help` answers at once.

Exit codes: 0 done; 1 a bug; 2 a wrong request, told in one sentence; 3 some items failed, the rest were done.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from patchlight.cli.bench import bench
from patchlight.cli.diffmask import diffmask
from patchlight.cli.doctor import doctor
from patchlight.cli.evaluate import evaluate
from patchlight.cli.explain import demo, explain
from patchlight.cli.figure import figure
from patchlight.cli.recommend import recommend
from patchlight.cli.serve import serve
from patchlight.cli.shapley import shapley
from patchlight.cli.tables import methods, metrics, models

app = typer.Typer(
    name="patchlight",
    help="Which patches of an image a Vision Transformer decided on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (demo, explain, evaluate, recommend, serve, figure, methods, metrics, models, doctor):
    app.command()(command)

app.add_typer(bench)
app.add_typer(diffmask)
app.add_typer(shapley)


def main() -> None:
    """The entry point."""
    app()


def _print_version(asked: bool) -> None:
    if asked:
        from patchlight import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _patchlight(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be no text at all

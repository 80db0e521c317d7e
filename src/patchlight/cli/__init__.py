"""The command line. Torch and the models are imported inside the commands, so that `--help` answers at once.

Exit codes: 0 done; 1 a bug; 2 a wrong request, explained in one sentence; 3 some items failed, the others are done.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from patchlight.cli.bench import bench
from patchlight.cli.doctor import doctor
from patchlight.cli.evaluate import evaluate
from patchlight.cli.explain import demo, explain
from patchlight.cli.figure import figure, figures
from patchlight.cli.options import add_commands, group
from patchlight.cli.recommend import recommend
from patchlight.cli.serve import serve
from patchlight.cli.tables import methods, metrics, models
from patchlight.cli.training import diffmask, shapley

app = group("patchlight", "Show which patches drove a Vision Transformer's prediction, and how faithful that is.")
add_commands(app, demo=demo, explain=explain, evaluate=evaluate, recommend=recommend, serve=serve)
add_commands(app, methods=methods, metrics=metrics, models=models, figure=figure, figures=figures, doctor=doctor)
for commands in (bench, diffmask, shapley):
    app.add_typer(commands)


def main() -> None:
    """The entry point."""
    app()


def _print_version(requested: bool) -> None:
    if requested:
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
            stream.reconfigure(errors="backslashreplace")  # a file name may not be valid text

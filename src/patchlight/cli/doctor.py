"""`patchlight doctor`: what is installed, what it runs on, and whether the bundled model can be explained with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from patchlight.cli.common import console, print_json, progress
from patchlight.cli.options import AsJson, Debug, command

if TYPE_CHECKING:
    from patchlight.report.installation import Findings

BROKEN = 2


@command
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """Say what is installed and missing, and try the bundled model; exit code 2 where something is broken."""
    with progress("looking"):
        from patchlight.report.installation import examine_installation

        found = examine_installation(debug)
    if as_json:
        print_json({**asdict(found), "well": found.well})
    else:
        _show(found)
    if not found.well:
        raise typer.Exit(BROKEN)


def _show(found: Findings) -> None:
    out = console()
    out.print(f"Patchlight {found.patchlight}, Python {found.python}, {found.platform}")
    out.print(", ".join(f"{package} {version}" for package, version in found.versions.items()), soft_wrap=True)
    out.print()
    for device in found.devices:
        memory = "" if device.memory_gb is None else f", {device.memory_gb} GB"
        out.print(
            f"{device.device}: {device.name}{memory}; precision 'auto' is {device.auto_inside} for methods that look "
            f"inside, {device.auto_masks} for those that remove parts",
            soft_wrap=True,
        )
    out.print()
    for extra in found.missing_extras:
        out.print(f"not installed: {extra['packages']}, for {extra['purpose']}: {extra['install']}", soft_wrap=True)
    if not found.missing_extras:
        out.print("all extras are installed")
    out.print()
    for check in found.checks:
        out.print(f"{'ok    ' if check.well else 'BROKEN'} {check.what}: {check.told}", soft_wrap=True)

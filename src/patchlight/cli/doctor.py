"""`patchlight doctor`: what is installed, what it runs on, and a self-test with the bundled model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from patchlight.cli.common import print_json, progress, show
from patchlight.cli.options import command

if TYPE_CHECKING:
    from patchlight.report.installation import Installation

BROKEN = 2


@command
def doctor(as_json: bool = False, debug: bool = False) -> None:
    """Check the installation and run a self-test. The exit code is 2 if something is broken."""
    with progress("checking"):
        from patchlight.report.installation import examine_installation

        installation = examine_installation(debug)
    if as_json:
        print_json({**asdict(installation), "well": installation.well})
    else:
        _print(installation)
    if not installation.well:
        raise typer.Exit(BROKEN)


def _print(installation: Installation) -> None:
    show(f"Patchlight {installation.patchlight}, Python {installation.python}, {installation.platform}")
    show(", ".join(f"{package} {version}" for package, version in installation.versions.items()))
    show()
    for device in installation.devices:
        memory = "" if device.memory_gb is None else f", {device.memory_gb} GB"
        show(
            f"{device.device}: {device.name}{memory}; precision 'auto' means {device.auto_inside} for methods with a "
            f"backward pass, {device.auto_masks} for perturbation methods"
        )
    show()
    for extra in installation.missing_extras:
        show(f"not installed: {extra['packages']}, for {extra['purpose']}: {extra['install']}")
    if not installation.missing_extras:
        show("all extras are installed")
    show()
    for check in installation.checks:
        show(f"{'ok    ' if check.well else 'BROKEN'} {check.what}: {check.result}")

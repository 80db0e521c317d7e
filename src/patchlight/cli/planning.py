"""`patchlight bench plan`: what a run will be, and what it will take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import print_json, print_table, progress
from patchlight.cli.options import AsJson, command
from patchlight.cli.recipes import RecipeOptions

if TYPE_CHECKING:
    from patchlight.bench.estimate import Estimated
    from patchlight.bench.plan import Plan


@command
def plan_run(
    chosen: RecipeOptions,
    estimate: Annotated[bool, typer.Option("--estimate", help="Time a first batch of everything.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="How long timing may take, for each group of methods.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """What a run will be: images, groups of methods, values; with --estimate, what it will take. Nothing is kept."""
    from patchlight.bench.estimate import estimated
    from patchlight.bench.executors import devices_of
    from patchlight.bench.plan import plan

    device = devices_of(chosen.device)[0]
    with progress("reading images and models"):
        whole = plan(chosen.recipe, device=device)
    found: list[Estimated] = []
    if estimate:
        with progress("timing a first batch of every group of methods"):
            found = estimated(whole, device, seconds)
    if as_json:
        print_json(_told(whole, found))
        return
    _print(whole, found, device)


def _told(whole: Plan, found: list[Estimated]) -> dict[str, object]:
    groups = [{"model": g.label, "methods": list(g.methods), "batch_size": g.batch_size} for g in whole.groups]
    about: dict[str, object] = {
        "recipe": whole.recipe.name,
        "images": len(whole.images),
        "values": whole.values,
        "groups": [asdict(each) | {"total": each.total} for each in found] or groups,
        "notes": whole.notes,
    }
    if found:
        about |= {
            "units": sum(each.units for each in found),
            "forwards": sum(each.forwards * each.images for each in found),
            "hours": sum(each.total for each in found) / 3600,
            "memory": max(each.memory for each in found),
            "at_least": any(each.cut for each in found),
        }
    return about


def _time(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> _time(5.04), _time(600), _time(90000)
    ('5 s', '10 min', '25 h')
    """
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.2g} s"


def _print(whole: Plan, found: list[Estimated], device: str) -> None:
    recipe = whole.recipe
    print(
        f"{recipe.name}: {len(whole.images)} images x {len(recipe.models)} model(s) x {len(recipe.methods)} methods x "
        f"{len(recipe.metrics)} metrics = {whole.values} values, in {len(whole.groups)} groups of methods"
    )
    if not found:
        rows = [(group.label, ", ".join(group.methods), str(group.batch_size)) for group in whole.groups]
        print_table(("model", "methods, explained together", "images at once"), rows)
    else:
        headings = ("model", "methods", "s/image", "forwards/image", "memory", "units", "in all")
        print_table(headings, [_row(each) for each in found])
    if found:
        units, seconds = sum(each.units for each in found), sum(each.total for each in found)
        forwards, memory = sum(each.forwards * each.images for each in found), max(each.memory for each in found)
        least = "at least " if any(each.cut for each in found) else ""
        print(
            f"{units} units; {least}{forwards:,.0f} forwards; {least}{_time(seconds)} of one process on {device}, "
            f"which takes up to {memory / 2**30:.1f} GB"
        )
        for reason in dict.fromkeys(reason for each in found for reason in each.failures):
            print(f"will fail: {reason}")
    for note in whole.notes:
        print(f"note: {note}")


def _row(each: Estimated) -> tuple[str, ...]:
    more = "> " if each.cut else ""
    speed = (f"{more}{each.seconds:.3g}", f"{more}{each.forwards:.0f}", f"{each.memory / 2**30:.1f} GB")
    return each.model, ", ".join(each.methods), *speed, str(each.units), f"{more}{_time(each.total)}"

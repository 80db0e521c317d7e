"""`patchlight bench plan`: the size of a run, and an estimate of its time and memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import print_json, print_table, progress, show
from patchlight.cli.options import command
from patchlight.cli.recipes import RecipeOptions

if TYPE_CHECKING:
    from patchlight.bench.estimate import Estimated
    from patchlight.bench.plan import Plan


@command
def plan_run(
    chosen: RecipeOptions,
    estimate: bool = False,
    seconds: Annotated[float, typer.Option(min=1)] = 60.0,
    as_json: bool = False,
) -> None:
    """Show what a run consists of, and with --estimate how long it takes. Nothing is saved."""
    from patchlight.bench.estimate import estimate_costs
    from patchlight.bench.executors import devices_of
    from patchlight.bench.plan import plan

    device = devices_of(chosen.device)[0]
    with progress("reading images and models"):
        planned = plan(chosen.recipe, device=device)
    costs: list[Estimated] = []
    if estimate:
        with progress("timing a first batch of every group of methods"):
            costs = estimate_costs(planned, device, seconds)
    if as_json:
        print_json(_as_json(planned, costs))
    else:
        _print(planned, costs, device)


def _as_json(planned: Plan, costs: list[Estimated]) -> dict[str, object]:
    groups = [{"model": g.label, "methods": list(g.methods), "batch_size": g.batch_size} for g in planned.groups]
    content: dict[str, object] = {
        "recipe": planned.recipe.name,
        "images": len(planned.images),
        "values": planned.values,
        "groups": [asdict(each) | {"total": each.total} for each in costs] or groups,
        "notes": planned.notes,
    }
    if costs:
        content |= {
            "units": sum(each.units for each in costs),
            "forwards": sum(each.forwards * each.images for each in costs),
            "hours": sum(each.total for each in costs) / 3600,
            "memory": max(each.memory for each in costs),
            "at_least": any(each.cut for each in costs),
        }
    return content


def _print(planned: Plan, costs: list[Estimated], device: str) -> None:
    from patchlight.core.text import duration, plural

    recipe = planned.recipe
    show(
        f"{recipe.name}: {plural(len(planned.images), 'image')} x {plural(len(recipe.models), 'model')} x "
        f"{plural(len(recipe.methods), 'method')} x {plural(len(recipe.metrics), 'metric')} = {planned.values} values, "
        f"in {plural(len(planned.groups), 'group')} of methods"
    )
    if not costs:
        rows = [(group.label, ", ".join(group.methods), str(group.batch_size)) for group in planned.groups]
        print_table(("model", "methods that run together", "images at once"), rows)
    else:
        headings = ("model", "methods", "s/image", "forwards/image", "memory", "units", "total")
        print_table(headings, [(*_cells(each), duration(each.total)) for each in costs])
        forwards, memory = sum(each.forwards * each.images for each in costs), max(each.memory for each in costs)
        least = "at least " if any(each.cut for each in costs) else ""
        show(
            f"{sum(each.units for each in costs)} units; {least}{forwards:,.0f} forwards; "
            f"{least}{duration(sum(each.total for each in costs))} with one process on {device}, "
            f"which uses up to {memory / 2**30:.1f} GB"
        )
        for reason in dict.fromkeys(reason for each in costs for reason in each.failures):
            show(f"will fail: {reason}")
    for note in planned.notes:
        show(f"note: {note}")


def _cells(each: Estimated) -> tuple[str, ...]:
    more = "> " if each.cut else ""
    speed = (f"{more}{each.seconds:.3g}", f"{more}{each.forwards:.0f}", f"{each.memory / 2**30:.1f} GB")
    return each.model, ", ".join(each.methods), *speed, str(each.units)

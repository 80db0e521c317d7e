"""Runs in other processes, which start quickly, and what each of them did."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch

from patchlight.bench import local
from patchlight.bench.events import Event, Start, UnitEnd, UnitStart
from patchlight.bench.local import PREEMPTED, RunOptions, preemptible, run
from patchlight.core.errors import PatchlightError
from tests.bench.small import recipe

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["patchlight.bench", "patchlight.methods", "patchlight.metrics.deletion", "timm"])


def start_run(
    images: Path, out: Path, log: Path, options: RunOptions | None = None, seconds: float = local.SECONDS
) -> Any:
    """A process that runs the small recipe in units of about `seconds`; its events are lines of `log`."""
    process = FORKING.Process(target=_run, args=(images, out, log, options, seconds))
    process.start()
    return process


def events(log: Path, event: str) -> list[dict[str, Any]]:
    """The events of this kind in a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [one for one in map(json.loads, lines) if one["event"] == event]


def _run(images: Path, out: Path, log: Path, options: RunOptions | None, seconds: float) -> None:
    torch.set_num_threads(1)
    local.SECONDS = seconds
    with open(log, "a", encoding="utf-8") as file, preemptible() as stop:

        def say(**event: Any) -> None:
            print(json.dumps(event), file=file, flush=True)

        def listen(event: Event) -> None:
            if isinstance(event, Start | UnitStart | UnitEnd):
                say(event=event.event, key=getattr(event, "key", ""))

        try:
            run(recipe(images), out, options, stop, listen)
        except PatchlightError as error:
            say(event="error", error=str(error))
            raise SystemExit(2) from error
    os._exit(PREEMPTED if stop.is_set() else 0)

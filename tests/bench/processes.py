"""Runs in processes of their own, begun quickly, and what each of them did."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import torch

from patchlight.bench.events import Event, Start, UnitEnd, UnitStart
from patchlight.bench.local import run
from patchlight.bench.queue import WHOLE, Part, Stop
from patchlight.core.errors import PatchlightError
from tests.bench.small import recipe

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    ["patchlight.bench", "patchlight.bench.workers", "patchlight.methods", "patchlight.metrics.deletion", "timm"]
)


def begun(images: Path, out: Path, log: Path, part: Part = WHOLE, **about: Any) -> Any:
    """A process that runs the small recipe; what it did is written to `log`, a line each."""
    process = FORKING.Process(target=_run, args=(images, out, log, part, about))
    process.start()
    return process


def together(images: Path, out: Path, logs: Path, count: int, **about: Any) -> list[dict[str, Any]]:
    """So many processes at once, and what they did, all ended well."""
    logs.mkdir(exist_ok=True)
    crew = [begun(images, out, logs / f"{i}.txt", **about) for i in range(count)]
    for process in crew:
        process.join(600)
    assert [process.exitcode for process in crew] == [0] * count, told(logs)
    return told(logs)


def told(logs: Path) -> list[dict[str, Any]]:
    """What the processes of a folder of logs did."""
    return [json.loads(line) for path in sorted(logs.glob("*.txt")) for line in path.read_text().splitlines()]


def keys(found: list[dict[str, Any]], event: str = "done") -> list[str]:
    """The units for which something happened."""
    return [one["key"] for one in found if one["event"] == event]


def _run(images: Path, out: Path, log: Path, part: Part, about: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if "most" in about:  # bytes a file may have: what is longer is told as a full disk is
        resource.setrlimit(resource.RLIMIT_FSIZE, (about["most"], about["most"]))
    if "seconds" in about:
        from patchlight.bench import queue

        queue.SECONDS = about["seconds"]
    if about.get("preemptible"):
        _preempted(images, out, log, part)
        return
    _listened(images, out, log, part, Stop())


def _preempted(images: Path, out: Path, log: Path, part: Part) -> None:
    from patchlight.bench.workers import PREEMPTED, preemptible

    with preemptible() as stop:
        _listened(images, out, log, part, stop)
    os._exit(PREEMPTED if stop.asked.is_set() else 0)


def _listened(images: Path, out: Path, log: Path, part: Part, stop: Stop) -> None:
    with open(log, "a", encoding="utf-8") as file:

        def say(**about: Any) -> None:
            print(json.dumps({"pid": os.getpid(), **about}), file=file, flush=True)

        def listen(event: Event) -> None:
            if isinstance(event, Start):
                say(event="start")
            if isinstance(event, UnitStart | UnitEnd):
                say(event=event.event, key=event.key)

        try:
            run(recipe(images), out, part=part, stop=stop, listen=listen)
        except PatchlightError as error:
            say(event="error", error=str(error))
            raise SystemExit(2) from error

"""Several processes of one machine in one run's folder: begun, listened to, and replaced when they die.

A worker is `python -m patchlight.bench.workers`. It is told on its standard input what to do, answers on its standard
output with a line of JSON for each event, and ends when its input does: it never outlives who began it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from patchlight.bench.claims import Claims
from patchlight.bench.events import EVENTS, End, Event, Listener, Start, UnitEnd, Waiting
from patchlight.bench.local import DEATHS, Summary, begin, run
from patchlight.bench.plan import load_model
from patchlight.bench.queue import WHOLE, Part, Queue, Stop
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Row
from patchlight.bench.store import Store
from patchlight.core.errors import PatchlightError
from patchlight.core.plugins import load_plugin, loaded_files

GRACE, SOONER = 25.0, 3.0
"""Seconds after which a process that was asked to stop ends, whatever it does, and by which its workers are sooner."""
PREEMPTED = 75
"""The exit code of a run that was asked to stop: the same command goes on (EX_TEMPFAIL)."""


def devices_of(device: str) -> list[str]:
    """The devices of `cuda:all`, or the one that is named.

    >>> devices_of("cpu")
    ['cpu']
    """
    if device != "cuda:all":
        return [device]
    count = torch.cuda.device_count()
    if not count:
        raise PatchlightError("--device cuda:all: there is no CUDA device on this machine; give --device cpu")
    return [f"cuda:{i}" for i in range(count)]


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_workers(
    recipe: Recipe,
    out: str | Path,
    workers: int,
    *,
    text: str = "",
    devices: Sequence[str] = ("cpu",),
    quick: bool = False,
    retry: bool = False,
    part: Part = WHOLE,
    stop: Stop | None = None,
    listen: Listener = lambda event: None,
) -> Summary:
    """What `run` does, by several processes, device after device; what they tell is told here."""
    stop, store = stop or Stop(), Store(out)
    store.make()
    claims = Claims(store.folder)
    with claims.present():
        stop.leave = lambda: claims.tell(gone=True)
        threads = max(1, cores() // workers)
        begun = begin(store, claims, recipe, text, devices[0], quick, retry, threads=threads, stop=stop, listen=listen)
        load_model.cache_clear()  # the workers have their own
        left = Queue(begun, part, stop, listen)
        before = left.values_done()
        whole = begun.whole
        listen(Start(whole.values, before, begun.notes, len(whole.images), list(recipe.models), str(store.folder)))
        crew = Crew(recipe, store.folder, text, quick, retry, part, workers, devices, stop, listen)
        now = crew.work(workers)
        left.done |= store.done()
        failures = store.failures()
        listen(End(failures, whole.values, left.values_done()))
        if left.left() and not stop.asked.is_set():
            raise PatchlightError(crew.why())
        return Summary(
            whole.values, before, now, crew.reused, left.left(), failures, (*whole.notes, *begun.notes, *crew.notes)
        )


@dataclass
class Worker:
    """A process, and how often it was begun anew."""

    number: int
    process: subprocess.Popen[str]
    deaths: int = 0
    ended: bool = False


class Crew:
    """The workers of a run."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        text: str,
        quick: bool,
        retry: bool,
        part: Part,
        workers: int,
        devices: Sequence[str],
        stop: Stop,
        listen: Listener,
    ) -> None:
        self.out, self.devices, self.stop, self.listen = out, devices, stop, listen
        self.told = {
            "recipe": recipe.model_dump_json(),
            "out": str(out.resolve()),
            "text": text,
            "quick": quick,
            "retry": retry,
            "part": asdict(part),
            "workers": workers,
            "plugins": loaded_files(),
        }
        self.events: queue.Queue[tuple[Worker, dict[str, Any] | None]] = queue.Queue()
        self.notes: list[str] = []
        self.reused = 0

    def work(self, count: int) -> int:
        """Have so many workers do what is left; how many values they did."""
        crew = [self._begin(number) for number in range(1, count + 1)]
        now, asked = 0, False
        try:
            while not all(worker.ended for worker in crew):
                if self.stop.asked.is_set() and not asked:
                    asked = True
                    for worker in crew:
                        worker.process.terminate()
                with contextlib.suppress(queue.Empty):
                    worker, told = self.events.get(timeout=0.2)
                    if told is None:
                        self._ended(crew, worker)
                    elif "error" in told:
                        self.notes.append(f"worker {worker.number} stopped: {told['error']}")
                    else:
                        event = event_of(told)
                        if isinstance(event, UnitEnd):
                            now, self.reused = now + event.values, self.reused + event.reused
                        if not isinstance(event, Start | End | Waiting):
                            self.listen(event)
        finally:
            for worker in crew:
                worker.process.kill()
                worker.process.wait()
        return now

    def _begin(self, number: int, deaths: int = 0) -> Worker:
        logs = self.out / "logs"
        logs.mkdir(exist_ok=True)
        paths = [str(Path(p).resolve()) for p in sys.path if p]
        with open(logs / f"worker-{number}.txt", "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "patchlight.bench.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        worker = Worker(number, process, deaths)
        assert process.stdin is not None
        device = self.devices[(number - 1) % len(self.devices)]
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({**self.told, "device": device}) + "\n")
            process.stdin.flush()
        threading.Thread(target=self._read, args=(worker,), daemon=True).start()
        return worker

    def _read(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in worker.process.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    self.events.put((worker, json.loads(line)))
        self.events.put((worker, None))

    def _ended(self, crew: list[Worker], worker: Worker) -> None:
        """A worker is over; one that died is begun anew, a few times."""
        worker.ended = True
        code = worker.process.wait()
        if code in (0, 2, PREEMPTED) or self.stop.asked.is_set():
            return
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        self.notes.append(f"worker {worker.number} {how}; see logs/worker-{worker.number}.txt")
        if worker.deaths < DEATHS:
            crew.append(self._begin(worker.number, worker.deaths + 1))

    def why(self) -> str:
        """Why not all is done."""
        return self.notes[-1] if self.notes else "not all units were done; run the same command again"


def event_of(told: dict[str, Any]) -> Event:
    """An event from its JSON."""
    about = {key: value for key, value in told.items() if key != "event"}
    if "rows" in about:
        about["rows"] = [Row(**row) for row in about["rows"]]
    return EVENTS[told["event"]](**about)


@contextlib.contextmanager
def preemptible(grace: float | None = None) -> Iterator[Stop]:
    """A stop that SIGTERM asks for: after the unit in flight, or `grace` seconds if it takes longer."""
    stop = Stop()

    def asked(*signals: Any) -> None:
        if not stop.asked.is_set():
            leave_after(stop, GRACE if grace is None else grace)
            stop.asked.set()

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield stop
        return
    earlier = signal.signal(signal.SIGTERM, asked)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, earlier)


def leave_after(stop: Stop, seconds: float) -> None:
    """End this process, whatever it does then, with a goodbye if there is somebody to take it."""

    def leave() -> None:
        goodbye = threading.Thread(target=stop.leave, daemon=True)
        goodbye.start()
        goodbye.join(2.0)
        os._exit(PREEMPTED)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _main() -> int:
    """A worker: what it does is told on the standard input, and its answers go where its output went."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print goes to the log
    told = json.loads(sys.stdin.readline())

    def answer(about: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            print(json.dumps(about), file=answers, flush=True)

    def listen(event: Event) -> None:
        light = [vars(replace(row, curve=None, parts={})) for row in event.rows] if isinstance(event, UnitEnd) else None
        answer({"event": event.event, **vars(event), **({} if light is None else {"rows": light})})

    with preemptible(GRACE - SOONER) as stop:
        threading.Thread(target=_orphaned, args=(sys.stdin, stop), daemon=True).start()
        try:
            for path in told["plugins"]:
                load_plugin(path)
            run(
                Recipe.model_validate_json(told["recipe"]),
                told["out"],
                text=told["text"],
                quick=told["quick"],
                device=told["device"],
                retry=told["retry"],
                part=Part(**told["part"]),
                workers=told["workers"],
                stop=stop,
                listen=listen,
            )
        except (PatchlightError, MemoryError, OSError) as error:
            answer({"error": " ".join(str(error).split()) or type(error).__name__})
            return 2
        return PREEMPTED if stop.asked.is_set() else 0


def _orphaned(given: IO[str], stop: Stop) -> None:
    """Stop when whoever began this process is gone."""
    given.read()
    leave_after(stop, GRACE)
    stop.asked.set()


if __name__ == "__main__":
    sys.exit(_main())

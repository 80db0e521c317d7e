"""Who does what in a run's folder, which any number of processes share, on any machines that see it.

owners/ has a file for each process at work, whose count of beats goes up every few seconds; claims/ has a file for each
unit somebody took, made in a way that only one can. A claim whose owner is dead is taken over under the next number, so
nothing is ever deleted while others look. No clock is compared with another machine's: an owner is dead where its count
stands still for as long as a minute of one's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_whole

BEAT, EXPIRY = 5.0, 60.0
"""Seconds between two beats, and without one after which an owner is dead."""
State = Literal["mine", "done", "taken"]
_PRESENT: set[str] = set()
"""Owners of this process that have not left."""


@dataclass(frozen=True)
class Owner:
    """A process at work: where it runs, and what it works on.

    `machine` tells process numbers of one machine from another's; `began` is when the process did, by its machine.
    `alone` was the first to come; `ready` is who has planned, and brought the folder in line with the plan.
    """

    id: str
    host: str
    machine: str
    pid: int
    began: str
    beat: int = 0
    alone: bool = False
    ready: bool = False
    plan: str = ""
    version: str = ""
    code: str = ""
    gone: bool = False


class Claim(NamedTuple):
    """What became of asking for a unit: its `number` is one more than its earlier owners, of whom `deaths` died.

    Those that were asked to stop did not die of it.
    """

    state: State
    number: int = 0
    deaths: int = 0


class Claims:
    """This process in a run's folder: what it holds, and who else is there."""

    def __init__(self, folder: Path) -> None:
        self.owners, self.claims = folder / "owners", folder / "claims"
        self.own = Owner(uuid.uuid4().hex[:12], platform.node(), _machine(), os.getpid(), _began(os.getpid()))
        self._seen: dict[str, tuple[Any, float]] = {}
        self._beating: set[str] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def present(self, failing: Callable[[Exception], None] = lambda error: None) -> Iterator[None]:
        """Be there, heart beating, until the end; `alone` says whether nobody else was when this one came."""
        for folder in (self.owners, self.claims):
            folder.mkdir(parents=True, exist_ok=True)
        _PRESENT.add(self.own.id)
        self._write()
        self.settled()
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT):
                try:
                    with self._lock:
                        self.own = replace(self.own, beat=self.own.beat + 1)
                        self._write()
                except PatchlightError as error:  # others will think it dead; its work is kept all the same
                    failing(error)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            _PRESENT.discard(self.own.id)
            with contextlib.suppress(PatchlightError):
                self.tell(gone=True)

    @property
    def alone(self) -> bool:
        return self.own.alone

    def settled(self) -> bool:
        """Whether it is known if others are at work: somebody here is, or a heart was seen to beat elsewhere; or none.

        An owner on another machine that was killed there looks alive until its heart has stood still for a minute.
        """
        others = self.others()
        if not others and not self.alone:
            self.tell(alone=True)
            self._clean()
        return not others or any(one.machine == _machine() or one.id in self._beating for one in others)

    def my_turn(self) -> bool:
        """Whether to plan now: somebody else has, or nobody is before this one who will."""
        others = self.others()
        first = self.alone or not any(one.alone or one.id < self.own.id for one in others)
        return first or any(one.ready for one in others)

    def tell(self, **about: Any) -> None:
        """Have others know more of this process."""
        with self._lock:
            self.own = replace(self.own, **about)
            self._write()

    def others(self) -> list[Owner]:
        """The others that live."""
        found = [_read_owner(path) for path in sorted(self.owners.glob("*.json"))]
        return [one for one in found if one is not None and one.id != self.own.id and self.lives(one.id)]

    def take(self, key: str) -> Claim:
        """Ask for a unit: it is `mine` now, `done`, or `taken` by somebody who lives."""
        number = deaths = 0
        while True:
            path = self.claims / f"{key}.{number}"
            if _made(path, self.own.id):
                return Claim("mine", number, deaths)
            holder = _read(path)
            if holder == "done":
                return Claim("done", number, deaths)
            if holder == self.own.id or (self._fresh(path, holder) if holder == "" else self.lives(holder)):
                return Claim("taken", number, deaths)
            one = _read_owner(self.owners / f"{holder}.json")
            number, deaths = number + 1, deaths + (one is None or not one.gone)

    def finish(self, key: str, claim: Claim) -> None:
        """Say that a unit is done; whoever reads this need not see its files yet."""
        write_whole(self.claims / f"{key}.{claim.number}", b"done")

    def lives(self, owner: str) -> bool:
        """Whether an owner is at work; one that never wrote itself down counts as if it stood still."""
        one = _read_owner(self.owners / f"{owner}.json")
        if one is not None and one.gone:
            return False
        if one is not None and one.machine == _machine() and one.began:
            return _began(one.pid) == one.began and (one.pid != os.getpid() or one.id in _PRESENT)
        return self._fresh(owner, None if one is None else one.beat)

    def _fresh(self, what: object, now: Any) -> bool:
        """Whether something has changed within the last minute of this process's own clock."""
        seen, since = self._seen.get(str(what), (None, None))
        if since is None or seen != now:
            self._seen[str(what)] = now, time.monotonic()
            if since is not None:
                self._beating.add(str(what))
            return True
        return time.monotonic() - since < EXPIRY

    def _write(self) -> None:
        write_whole(self.owners / f"{self.own.id}.json", json.dumps(asdict(self.own)).encode())

    def _clean(self) -> None:
        """Nobody else is here: what others left behind says nothing any more."""
        for path in (*self.owners.iterdir(), *self.claims.iterdir()):
            if path.name != f"{self.own.id}.json" and not path.name.startswith("."):  # somebody is just coming
                with contextlib.suppress(OSError):
                    path.unlink()


def _made(path: Path, text: str) -> bool:
    """Make a file that must not be there yet; False where it is."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    except OSError as error:
        raise PatchlightError(f"'{path}' cannot be written: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise PatchlightError(f"'{path}' cannot be written: {error.strerror or error}") from error
    return True


def _read(path: Path) -> str:
    """Who holds a claim; nobody yet where it is being made."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _read_owner(path: Path) -> Owner | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Owner(**{key: value for key, value in told.items() if key in Owner.__dataclass_fields__})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


@cache
def _machine() -> str:
    """What tells this machine's processes from another's: its boot, and the space its process numbers count in."""
    found = [platform.node()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def _began(pid: int) -> str:
    """When a process of this machine began; empty where there is none, or where this system does not tell."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if words[0] in "ZX" else words[19]
    except (OSError, IndexError):
        return ""

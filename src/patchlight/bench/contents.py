"""What is in the images of a plan: hashes of the files they are read from, or of pixels where they have no files.

Hashes of files are kept from plan to plan in the user's cache (PATCHLIGHT_CACHE, else XDG_CACHE_HOME/patchlight or
~/.cache/patchlight), by path, size and times: of fifty thousand images that were planned before, none is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchlight.bench.events import Listener, Planning
from patchlight.core.errors import PatchlightError
from patchlight.core.files import cache_folder, write_atomic
from patchlight.core.fingerprints import json_digest

if TYPE_CHECKING:
    from patchlight.data import Data, Sample

PATIENCE = 2.0
"""Seconds of planning that need no word."""
RACY = 2.0
"""Seconds during which a file may change once more without its times showing it."""
THREADS, AT_ONCE = 4, 32
FORMAT = 1
Content = tuple[str, set[str] | None]
"""The hash of a sample, and which annotations it has; None of one that cannot be read."""


def contents(data: Data, indices: Sequence[int], path: str, listen: Listener) -> list[Content]:
    """Of each of these samples, the hash of what is in it, and its annotations.

    A hash is that of files, boxes and mask (of pixels, where a kind of data does not say which files it reads), then
    `-` and that of the class; of a sample that cannot be read, that of the sentence that says why, less the path.
    """
    kept = KeptHashes(path)

    def some(begin: int) -> list[Content]:
        return [_content(data, index, path, kept.hash_of) for index in indices[begin : begin + AT_ONCE]]

    found: list[Content] = []
    told = time.monotonic()
    pool = ThreadPoolExecutor(THREADS)
    try:
        for part in pool.map(some, range(0, len(indices), AT_ONCE)):
            found += part
            if time.monotonic() - told > PATIENCE:
                told = time.monotonic()
                listen(Planning(len(found), len(indices)))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted plan need not read the rest
        kept.write()
    return found


def content_of(data: Data, index: int, path: str = "") -> str:
    """The hash of what is in a sample now, as `contents` gives it; files are read, whatever the cache says."""
    return _content(data, index, path, file_hash)[0]


def same_classes(data: Data, indices: Sequence[int], contents: Sequence[str]) -> bool:
    """Whether samples still have the classes that these hashes end with, as far as that is known without reading."""
    if data.sources is None:
        return True
    try:
        labels = [data.sources(data.names[index]).label for index in indices]
    except (OSError, PatchlightError):
        return False
    ends = [content.partition("-")[2] for content in contents]
    return all(not end or end == _class_digest(data, label) for end, label in zip(ends, labels, strict=True))


def planned_sample(data: Data, index: int, content: str) -> Sample:
    """The sample, read once and checked; where it cannot be read, the sentence that says why.

    Its class, which may be numbered otherwise than when the run was planned, does not count.
    """
    sample = data[index]
    found = drawn_digest(sample) if data.sources is None else content_of(data, index)
    if found.partition("-")[0] != content.partition("-")[0]:
        name = data.names[index]
        raise PatchlightError(f"'{name}' has changed since the run was planned; run the same command again")
    return sample


def _content(data: Data, index: int, path: str, hash_of: Callable[[Path], str]) -> Content:
    try:
        return _read(data, index) if data.sources is None else _unread(data, data.names[index], hash_of)
    except OSError as error:
        return json_digest(error.strerror or type(error).__name__), None
    except PatchlightError as error:
        return json_digest(str(error).replace(path, "") if path else str(error)), None


def _unread(data: Data, name: str, hash_of: Callable[[Path], str]) -> Content:
    """A sample by its files."""
    assert data.sources is not None
    sources = data.sources(name)
    drawn = json_digest([[hash_of(file) for file in sources.files], sources.values])
    return f"{drawn}-{_class_digest(data, sources.label)}", sources.annotations


def _read(data: Data, index: int) -> Content:
    """A sample by its pixels."""
    sample = data[index]
    drawn = {"labels": sample.label, "boxes": sample.boxes, "masks": sample.mask}
    known = {kind for kind, value in drawn.items() if value is not None}
    known |= {"labels", "masks"} if sample.regions is not None else set()
    return f"{drawn_digest(sample)}-{_class_digest(data, sample.label)}", known


def _class_digest(data: Data, label: int | None) -> str:
    """The hash of a class: its index and its name."""
    if label is None:
        return json_digest(None)
    return json_digest([label, data.labels[label] if data.labels and 0 <= label < len(data.labels) else ""])


def drawn_digest(sample: Sample) -> str:
    """The hash of a sample's pixels, boxes and mask; its class, which may be numbered otherwise, is not in it."""
    drawn = [sample.boxes, sample.mask, sample.regions]
    shapes = [None if t is None else [str(t.dtype), *t.shape] for t in drawn]
    hashed = hashlib.sha256(json.dumps([sample.image.mode, sample.image.size, shapes]).encode())
    hashed.update(sample.image.tobytes())
    for tensor in drawn:
        if tensor is not None:
            hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a file")
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class KeptHashes:
    """Hashes of the files below a folder of data, kept in one file of the user's cache.

    One is believed where the file's size and times are what they were; one of a file that changed less than two
    seconds ago is not kept. Many processes may write the file, each of them whole: the last wins.
    """

    def __init__(self, folder: str) -> None:
        self.path = cache_folder() / "files" / f"{json_digest(os.path.abspath(folder))}.json"
        self.known = _kept(self.path) if folder else {}
        self.new: dict[str, list[Any]] = {}
        self.folder = folder

    def hash_of(self, path: Path) -> str:
        """The SHA-256 of a file, read only where it is not known."""
        name = os.path.abspath(path)
        stamp = _stamp(name)
        entry = self.known.get(name)
        if entry is not None and entry[:-1] == stamp:
            return str(entry[-1])
        found = file_hash(path)
        now = time.time_ns()
        if stamp == _stamp(name) and all(abs(now - at) > RACY * 1e9 for at in stamp[1:]):
            self.new[name] = [*stamp, found]
        return found

    def write(self) -> None:
        """Keep what was found, beside what others wrote meanwhile; a cache that cannot be written is no error."""
        if not self.folder or not self.new:
            return
        whole = {"format": FORMAT, "folder": os.path.abspath(self.folder), "files": _kept(self.path) | self.new}
        with contextlib.suppress(PatchlightError):
            write_atomic(self.path, json.dumps(whole).encode())


def _stamp(name: str) -> list[int]:
    about = os.stat(name)
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _kept(path: Path) -> dict[str, list[Any]]:
    """What a cache holds; nothing where it is missing, damaged or of another format."""
    try:
        told = json.loads(path.read_bytes())
        files = told["files"] if told["format"] == FORMAT else {}
        return {name: entry for name, entry in files.items() if len(entry) == 4}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

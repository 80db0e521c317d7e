"""Hashes the images of a plan: the files they are read from, or the pixels of images without files.

Hashes of files are cached by path, size and times in the user's cache folder (PATCHLIGHT_CACHE, else
XDG_CACHE_HOME/patchlight or ~/.cache/patchlight), so planning the same images again opens none of them.
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
"""Seconds between two progress events."""
RACY = 2.0
"""Seconds within which a file may change again without a change of its times."""
THREADS, AT_ONCE = 4, 32
FORMAT = 1
Content = tuple[str, set[str] | None]
"""The hash of a sample, and the kinds of annotations it has; None for a sample that cannot be read."""


def contents(data: Data, indices: Sequence[int], path: str, listen: Listener) -> list[Content]:
    """The hash of each sample's content, and its annotations.

    A hash has two parts, joined by `-`: the hash of files, boxes and mask (of pixels, if the kind of data does not list
    its files), and the hash of the class. For an unreadable sample it is the hash of the error without the path.
    """
    cache = HashCache(path)

    def read_part(begin: int) -> list[Content]:
        return [_content(data, index, path, cache.hash_of) for index in indices[begin : begin + AT_ONCE]]

    results: list[Content] = []
    reported = time.monotonic()
    pool = ThreadPoolExecutor(THREADS)
    try:
        for part in pool.map(read_part, range(0, len(indices), AT_ONCE)):
            results += part
            if time.monotonic() - reported > PATIENCE:
                reported = time.monotonic()
                listen(Planning(len(results), len(indices)))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted plan need not read the rest
        cache.write()
    return results


def content_of(data: Data, index: int) -> str:
    """The hash of a sample's present content, as in `contents`, without the cache."""
    return _content(data, index, "", file_hash)[0]


def same_classes(data: Data, indices: Sequence[int], contents: Sequence[str]) -> bool:
    """Whether the samples still have the classes that these hashes end with; no image is read."""
    if data.sources is None:
        return True
    try:
        labels = [data.sources(data.names[index]).label for index in indices]
    except (OSError, PatchlightError):
        return False
    ends = [content.partition("-")[2] for content in contents]
    return all(not end or end == _class_digest(data, label) for end, label in zip(ends, labels, strict=True))


def read_planned(data: Data, index: int, content: str) -> Sample:
    """Read a sample and check its content against the planned hash.

    The class is not checked: its index may have changed since the run was planned.
    """
    sample = data[index]
    digest = sample_digest(sample) if data.sources is None else content_of(data, index)
    if digest.partition("-")[0] != content.partition("-")[0]:
        name = data.names[index]
        raise PatchlightError(f"'{name}' has changed since the run was planned; run the same command again")
    return sample


def _content(data: Data, index: int, path: str, hash_of: Callable[[Path], str]) -> Content:
    try:
        return _content_by_pixels(data, index) if data.sources is None else _content_by_files(data, index, hash_of)
    except OSError as error:
        return json_digest(error.strerror or type(error).__name__), None
    except PatchlightError as error:
        return json_digest(str(error).replace(path, "") if path else str(error)), None


def _content_by_files(data: Data, index: int, hash_of: Callable[[Path], str]) -> Content:
    """The content of a sample by its files."""
    assert data.sources is not None
    sources = data.sources(data.names[index])
    digest = json_digest([[hash_of(file) for file in sources.files], sources.values])
    return f"{digest}-{_class_digest(data, sources.label)}", sources.annotations


def _content_by_pixels(data: Data, index: int) -> Content:
    """The content of a sample by its pixels."""
    sample = data[index]
    values = {"labels": sample.label, "boxes": sample.boxes, "masks": sample.mask}
    annotations = {kind for kind, value in values.items() if value is not None}
    annotations |= {"labels", "masks"} if sample.regions is not None else set()
    return f"{sample_digest(sample)}-{_class_digest(data, sample.label)}", annotations


def _class_digest(data: Data, label: int | None) -> str:
    """The hash of a class: its index and its name."""
    if label is None:
        return json_digest(None)
    return json_digest([label, data.labels[label] if data.labels and 0 <= label < len(data.labels) else ""])


def sample_digest(sample: Sample) -> str:
    """The hash of a sample's pixels, boxes and mask, without its class."""
    tensors = [sample.boxes, sample.mask, sample.regions]
    shapes = [None if t is None else [str(t.dtype), *t.shape] for t in tensors]
    hashed = hashlib.sha256(json.dumps([sample.image.mode, sample.image.size, shapes]).encode())
    hashed.update(sample.image.tobytes())
    for tensor in tensors:
        if tensor is not None:
            hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(0, "not a file")
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class HashCache:
    """Cached hashes of the files below a folder of data, in one file of the user's cache folder.

    A hash is valid as long as the file has the same size and times; files that changed less than two seconds ago are
    not cached. Several processes may write the cache at the same time: each writes the whole file, and the last wins.
    """

    def __init__(self, folder: str) -> None:
        self.path = cache_folder() / "files" / f"{json_digest(os.path.abspath(folder))}.json"
        self.entries = _read_cache(self.path) if folder else {}
        self.new: dict[str, list[Any]] = {}
        self.folder = folder

    def hash_of(self, path: Path) -> str:
        """The SHA-256 of a file, from the cache if possible."""
        name = os.path.abspath(path)
        stamp = _stamp(name)
        entry = self.entries.get(name)
        if entry is not None and entry[:-1] == stamp:
            return str(entry[-1])
        digest = file_hash(path)
        now = time.time_ns()
        if stamp == _stamp(name) and all(abs(now - at) > RACY * 1e9 for at in stamp[1:]):
            self.new[name] = [*stamp, digest]
        return digest

    def write(self) -> None:
        """Add the new hashes to the cache; a cache that cannot be written is not an error."""
        if not self.folder or not self.new:
            return
        content = {"format": FORMAT, "folder": os.path.abspath(self.folder), "files": _read_cache(self.path) | self.new}
        with contextlib.suppress(PatchlightError):
            write_atomic(self.path, json.dumps(content).encode())


def _stamp(name: str) -> list[int]:
    status = os.stat(name)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_cache(path: Path) -> dict[str, list[Any]]:
    """The entries of a cache file; none if it is missing, damaged or of another format."""
    try:
        content = json.loads(path.read_bytes())
        files = content["files"] if content["format"] == FORMAT else {}
        return {name: entry for name, entry in files.items() if len(entry) == 4}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

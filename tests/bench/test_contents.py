"""What is in an image is known by its files: hashed once, found again by size and times, decoded only without files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from patchlight.bench import contents as room
from patchlight.bench.contents import cache_folder, content_of, contents, file_hash, read_planned
from patchlight.core.errors import PatchlightError
from patchlight.data import Data, Sample, open_data
from tests.data.files import picture, save_array, write


def quiet(event: object) -> None:
    """Nobody listens."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "RACY", 0.0)  # a file's change of status cannot be dated back


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, (kind, colour) in enumerate((("cat", "red"), ("cat", "blue"), ("dog", "green"))):
        picture(tmp_path / "data" / kind / f"{i}.png", colour=colour)
    return tmp_path / "data"


def found(folder: Path, **options: Any) -> list[tuple[str, set[str] | None]]:
    data = open_data("folder", folder, **options)
    return contents(data, range(len(data)), str(folder), quiet)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read for their hashes."""
    names: list[str] = []

    def counted(path: Path) -> str:
        names.append(Path(path).name)
        return file_hash(path)

    monkeypatch.setattr(room, "file_hash", counted)
    return names


def test_nothing_is_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)
    assert [known for _, known in found(folder)] == [{"labels"}] * 3
    assert len({digest for digest, _ in found(folder)}) == 3


def test_files_are_hashed_once(folder: Path, hashed: list[str]) -> None:
    first = found(folder)
    assert sorted(hashed) == ["0.png", "1.png", "2.png"]
    assert found(folder) == first
    assert len(hashed) == 3
    picture(folder / "cat" / "1.png", colour="white")
    after = found(folder)
    assert hashed[3:] == ["1.png"]
    assert [a == b for a, b in zip(first, after, strict=True)] == [True, False, True]


def test_a_change_that_keeps_size_and_date_is_seen(folder: Path, hashed: list[str]) -> None:
    """The date of a file's contents can be set back; that of its status cannot."""
    path = folder / "cat" / "0.png"
    before, was = found(folder), path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    time.sleep(0.02)
    path.write_bytes(bytes(data))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert path.stat().st_size == was.st_size
    assert path.stat().st_mtime_ns == was.st_mtime_ns
    assert found(folder)[0] != before[0]
    assert hashed[3:] == ["0.png"]


def test_a_file_that_was_just_written_is_not_kept(
    folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RACY", 60.0)
    assert found(folder) == found(folder)
    assert len(hashed) == 6
    assert not list(cache_folder().rglob("*.json"))


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"format": 0, "files": {}}', b'{"format": 1, "files": [1]}'])
def test_a_damaged_cache_is_ignored_and_written_again(folder: Path, hashed: list[str], damage: bytes) -> None:
    first = found(folder)
    (cache,) = cache_folder().rglob("*.json")
    cache.write_bytes(damage)
    assert found(folder) == first
    assert len(hashed) == 6
    assert len(json.loads(cache.read_bytes())["files"]) == 3


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = write(folder.parent / "blocked", "a file, not a folder")
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(blocked / "below"))
    assert found(folder) == found(folder)


def test_the_place_of_the_data_does_not_matter_and_the_class_does(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    shutil.copytree(folder, elsewhere)
    assert found(elsewhere) == found(folder)
    numbered = found(folder, classes=["bird", "cat", "dog"])
    for (one, _), (other, _) in zip(found(folder), numbered, strict=True):
        drawn, _, label = one.partition("-")
        assert other.partition("-")[0] == drawn
        assert other.partition("-")[2] != label


def test_a_missing_file_differs_from_one_that_is_there(folder: Path) -> None:
    data = open_data("folder", folder)
    gone = folder / "cat" / "0.png"
    before = contents(data, range(3), str(folder), quiet)
    gone.unlink()
    after = contents(data, range(3), str(folder), quiet)
    assert after[0][1] is None
    assert after[0][0] != before[0][0]
    assert after[1:] == before[1:]
    assert content_of(data, 0) == after[0][0]
    with pytest.raises(PatchlightError, match="no image at"):
        read_planned(data, 0, before[0][0])


def test_what_is_no_image_fails_when_it_is_read(folder: Path) -> None:
    write(folder / "cat" / "0.png", "no picture")
    data = open_data("folder", folder)
    (content, known), *_ = contents(data, range(3), str(folder), quiet)
    assert known == {"labels"}
    assert content_of(data, 0) == content
    with pytest.raises(PatchlightError, match="not a readable image"):
        read_planned(data, 0, content)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    data = open_data("folder", folder)
    (folder / "cat" / "0.png").unlink()
    os.mkfifo(folder / "cat" / "0.png")
    assert contents(data, range(3), str(folder), quiet)[0][1] is None


def test_classes_may_be_numbered_otherwise(folder: Path) -> None:
    """As it runs, a folder's classes are the model's: the samples are still those planned."""
    planned = [content for content, _ in found(folder)]
    data = open_data("folder", folder, classes=["bird", "cat", "dog"])
    for i, content in enumerate(planned):
        assert read_planned(data, i, content).name == data.names[i]


def made_up(**changed: Any) -> Data:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    sample = Sample("a", changed.pop("image", image), **{"label": 1, **changed})
    return Data("toy", ["a"], lambda name: sample, ["x", "y"])


@pytest.mark.parametrize(
    ("changed", "known"),
    [
        ({}, {"labels"}),
        ({"label": None}, set()),
        ({"boxes": torch.tensor([[0.0, 0.0, 2.0, 2.0]])}, {"labels", "boxes"}),
        ({"mask": torch.ones(4, 4, dtype=torch.int8)}, {"labels", "masks"}),
        ({"image": Image.new("RGB", (4, 4))}, {"labels"}),
    ],
)
def test_without_files_pixels_are_hashed(changed: dict[str, Any], known: set[str]) -> None:
    data = made_up(**changed)
    ((content, have),) = contents(data, [0], "", quiet)
    assert have == known
    assert not list(cache_folder().rglob("*.json"))
    assert read_planned(data, 0, content).name == "a"
    plain = contents(made_up(), [0], "", quiet)[0][0]
    assert (content == plain) == (not changed)
    if changed and "label" not in changed:
        with pytest.raises(PatchlightError, match="has changed"):
            read_planned(made_up(), 0, content)


def folder_data(root: Path) -> tuple[str, list[Path]]:
    return "folder", [picture(root / "cat" / "a.png")]


def mura(root: Path) -> tuple[str, list[Path]]:
    return "mura", [picture(root / "valid/XR_WRIST/patient1/study1_positive/image1.png")]


def imagenet_csv(root: Path) -> tuple[str, list[Path]]:
    boxes = write(root / "boxes.csv", "image,class_index,xmin,ymin,xmax,ymax\na,1,5,6,25,26\n")
    return "imagenet", [picture(root / "images/a.JPEG"), boxes]


def imagenet_xml(root: Path) -> tuple[str, list[Path]]:
    box = "<bndbox><xmin>5</xmin><ymin>6</ymin><xmax>25</xmax><ymax>26</ymax></bndbox>"
    xml = f"<annotation><object><name>n01443537</name>{box}</object></annotation>"
    drawn = write(root / "Annotations/CLS-LOC/val/a.xml", xml)
    return "imagenet", [picture(root / "val/n01443537/a.JPEG"), drawn]


def imagenet_s(root: Path) -> tuple[str, list[Path]]:
    ids = np.zeros((30, 40, 3), dtype=np.uint8)
    ids[5:25, 5:25, 0] = 1
    mask = save_array(root / "validation-segmentation/n01440764/a.png", ids)
    listed = write(root / "ImageNetS_categories_im3.txt", "n01440764\nn01443537\nn01484850")
    return "imagenet-s", [picture(root / "validation/n01440764/a.JPEG"), mask, listed]


def pets(root: Path) -> tuple[str, list[Path]]:
    trimap = np.full((30, 40), 2)
    trimap[5:25, 5:25] = 1
    return "pets", [picture(root / "images/Beagle_1.jpg"), save_array(root / "trimaps/Beagle_1.png", trimap)]


KINDS = [folder_data, mura, imagenet_csv, imagenet_xml, imagenet_s, pets]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_annotations_are_those_of_the_sample(make: Callable[[Path], tuple[str, list[Path]]], tmp_path: Path) -> None:
    kind, _ = make(tmp_path / "set")
    data = open_data(kind, tmp_path / "set")
    assert data.sources is not None
    read = Data(data.name, data.names, data.read, data.labels)
    ((content, known),) = contents(data, [0], str(tmp_path / "set"), quiet)
    ((pixels, have),) = contents(read, [0], "", quiet)
    assert known == have
    assert content.partition("-")[0] != pixels.partition("-")[0]
    assert content == contents(data, [0], str(tmp_path / "set"), quiet)[0][0]


def changed(path: Path) -> None:
    """Other contents of the same kind."""
    if path.suffix in (".csv", ".xml"):
        path.write_text(path.read_text().replace("25", "27"))
    elif path.suffix == ".txt":
        path.write_text(path.read_text().replace("n01440764", "n01496331"))
    else:
        pixels = np.asarray(Image.open(path)).copy()
        if path.suffix == ".png":
            pixels.flat[0] = 1
        else:
            pixels[:8, :8] = 1
        Image.fromarray(pixels).save(path)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_file_counts(make: Callable[[Path], tuple[str, list[Path]]], tmp_path: Path) -> None:
    """Whatever a sample is read from is changed in turn: its hash is another, and the planned one is refused."""
    kind, files = make(tmp_path / "set")
    seen = set()
    for path in [None, *files]:
        if path is not None:
            changed(path)
        data = open_data(kind, tmp_path / "set")
        content = contents(data, [0], str(tmp_path / "set"), quiet)[0][0]
        assert read_planned(data, 0, content).name == data.names[0]
        for earlier in (one for one in seen if one.partition("-")[0] != content.partition("-")[0]):
            with pytest.raises(PatchlightError, match="has changed"):
                read_planned(data, 0, earlier)
        seen.add(content)
    assert len(seen) == len(files) + 1

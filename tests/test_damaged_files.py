"""Files that were cut, edited or forged: every reader works or raises `PatchlightError`, soon and in little memory."""

from __future__ import annotations

import json
import re
import resource
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import patchlight as pl
from patchlight.anatomy.preprocessing import applied, read_preprocess
from patchlight.anatomy.weights import read_labels
from patchlight.bench.local import run
from patchlight.bench.recipe import read_recipe
from patchlight.bench.share import export
from patchlight.bench.tables import as_markdown, read_tables
from patchlight.core.fingerprints import json_digest
from patchlight.core.images import Preprocess, to_batch
from patchlight.core.recipes import bundled_recipes
from patchlight.data import load_batch, open_data
from patchlight.data.base import read_list
from patchlight.study.recommend.decide import decide
from patchlight.study.recommend.record import RaceRecord
from patchlight.trained.diffmask.gates import DiffMask
from patchlight.trained.diffmask.settings import DiffMaskRecipe
from patchlight.trained.loop import cut_metrics, read_checkpoint, write_checkpoint
from patchlight.trained.shapley.networks import ViTShapley
from patchlight.trained.shapley.settings import ShapleyRecipe
from tests.bench.small import pictures, recipe, text
from tests.data.files import picture, write
from tests.study.synthetic import record

SECONDS, MEMORY = 5, 400 * 2**20
JUNK = [
    *b' null true -1 0 3.5 1e999 NaN nan inf [] {} [[]] "" "x"'.split(b" "),
    *(b"9" * 30, b"9" * 5000, b'"' + b"9" * 5000 + b'"', b'"../../x"', b'"\\u0000"', b"\0", b"\xff\xfe", b"\xc2\xb2"),
    *(b"[" * 5000, b'"', b"\n", b"#", b"," * 50, b"x" * 200_000, "٣".encode(), b'"\\ud800"', b"\r", b'{"a": {"b": 1}}'),
    *b'1e308 1e-320 "F16" "BF16" "F8_E4M3" "U64" "BOOL"'.split(b" "),  # the last are types of safetensors
]
ODD = [b"", b"null", b"[]", b"{}", b"3", b'"x"', b"\xff\xfe{}", b"\0" * 100, b"[" * 100_000, b'{"a":' * 5000, b"\n" * 9]
TOKEN = re.compile(rb'"[^"]*"|[^\s,:=\[\]{}"]+|[,:=\[\]{}]')


@dataclass
class Reader:
    """Sound files, a call that reads them, and how a forger makes changed files look sound."""

    files: list[Path]
    read: Callable[[], object]
    seal: Callable[[bytes], bytes] = bytes


def training_recipe(kind: str, reader: Any) -> Callable[[Path], Reader]:
    def build(folder: Path) -> Reader:
        source = next(iter(bundled_recipes(kind).values()))
        path = write(folder / "recipe.toml", source.read_text(encoding="utf-8"))
        return Reader([path], lambda: reader.read(path))

    return build


def annotations(folder: Path) -> Reader:
    """Labels, boxes and COCO's JSON, one at a time, beside two images."""
    images = [picture(folder / "images" / name) for name in ("a.png", "b.png")]
    box = "image,xmin,ymin,xmax,ymax\na.png,1,2,10,12\nb.png,0,0,5,5\n"
    polygon = {"image_id": 1, "category_id": 5, "bbox": [4, 2, 20, 10], "segmentation": [[4, 2, 24, 2, 24, 12, 4, 12]]}
    runs = {"image_id": 2, "category_id": 5, "segmentation": {"size": [30, 40], "counts": [600, 500, 100]}}
    packed = {"image_id": 2, "category_id": 9, "iscrowd": 1, "segmentation": {"size": [30, 40], "counts": "hbU1"}}
    sizes = {"width": 40, "height": 30}
    scene = {
        "images": [{"id": i + 1, "file_name": path.name, **sizes} for i, path in enumerate(images)],
        "annotations": [polygon, runs, packed],
        "categories": [{"id": 5, "name": "zebra"}, {"id": 9, "name": "ant"}],
    }
    files = {
        "labels": write(folder / "labels.csv", 'name,label\na.png,3\nb.png,"yak, wild"\n'),
        "boxes": write(folder / "boxes.csv", box),
        "coco": write(folder / "annotations.json", json.dumps(scene)),
    }

    def read() -> None:
        for option, path in files.items():
            whole = Preprocess((30, 40), (0.5,) * 3, (0.5,) * 3, crop_pct=1.0, fit="squash")
            data = attempt(lambda option=option, path=path: open_data("files", folder / "images", **{option: path}))
            if data is not None:
                load_batch(data, range(len(data)), whole)

    return Reader(list(files.values()), read)


def attribution(folder: Path) -> Reader:
    """What can be loaded can also be used."""
    target, preprocess = torch.tensor([0, 1]), pl.Preprocess((8, 8))
    made = pl.Attribution(torch.rand(2, 2, 2), target, "m", "vit", (8, 8), preprocess=preprocess)
    place = made.save(folder / "map")
    pl.Attribution.load(place)  # a sound one is not refused

    def read() -> None:
        found = attempt(lambda: pl.Attribution.load(place))
        if found is None:
            return
        try:
            assert found.scores.dtype in (torch.float32, torch.float64)
            assert (len(found.captions), found.upsample(4).shape[-2:]) == (2, (4, 4))
            found[::-1].to_frame()
            found.overlay(Image.new("RGB", (9, 7)))
            found.save(folder / "again", force=True)
        except pl.PatchlightError as error:
            raise AssertionError("the damaged attribution was loaded, but cannot be used") from error

    return Reader(sorted(place.iterdir()), read)


def label_files(folder: Path) -> Reader:
    plain = write(folder / "names.txt", "cat\ndog\n")
    table = write(folder / "names.csv", 'index,name\n1,dog\n0,"cat, wild"\n')
    listed = write(folder / "list.txt", "# two\n- a.png\nb.png\n")
    calls = [lambda: read_labels(plain), lambda: read_labels(table), lambda: read_list(listed, ["a.png", "b.png"])]
    return Reader([plain, table, listed], lambda: [attempt(call) for call in calls])


def preprocessing(folder: Path) -> Reader:
    fields: dict[str, Any] = {"size": [64, 64], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9, "fit": "crop"}
    path = write(folder / "preprocess.json", json.dumps(fields))
    image = picture(folder / "a.png")
    return Reader([path], lambda: to_batch(image, applied(read_preprocess(path), lambda: Preprocess((64, 64)))))


def bench_run(folder: Path) -> Path:
    run(recipe(pictures(folder / "images", 2)), folder / "run")
    return folder / "run"


def read_run(folder: Path) -> None:
    opened = pl.bench.open(folder)
    _ = repr(opened), opened.notes, opened.table(), attempt(lambda: opened.maps("Pocket", "GenAtt"))
    as_markdown(read_tables(folder))


def sealed(data: bytes) -> bytes:
    """A manifest with the checksum of its content."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(content, dict):
        return data
    content.pop("sum", None)
    return json.dumps({**content, "sum": json_digest(content)}).encode()


def manifest(folder: Path) -> Reader:
    out = bench_run(folder)
    return Reader([out / "manifest.json"], lambda: read_run(out), sealed)


def exported(folder: Path) -> Reader:
    out = folder / "public"
    export(bench_run(folder), out)
    files = [path for path in sorted(out.rglob("*")) if path.suffix in (".parquet", ".safetensors", ".json")]
    return Reader(files, lambda: read_run(out))


def explainer(kind: Any) -> Callable[[Path], Reader]:
    def build(folder: Path) -> Reader:
        shutil.copytree(kind.shipped, folder / "explainer")
        files = sorted(p for p in (folder / "explainer").iterdir() if p.suffix != ".md")
        vit = pl.load("pocket")
        return Reader(files, lambda: kind.read(folder / "explainer", vit))

    return build


def race(folder: Path) -> Reader:
    made = record({"good": 0.4, "fair": 0.3, "weak": 0.1, "random": 0.0}, 8)
    stored = RaceRecord.begin(made.about, folder)
    for place, cell in made.cells():
        stored.add(place, cell.method, cell.metric, cell.value)

    def read() -> None:
        found = RaceRecord.resume(folder)
        if found is not None and found.about == stored.about:  # others are refused
            str(decide(found))

    return Reader(sorted(folder.iterdir()), read)


def checkpoint(folder: Path) -> Reader:
    path, metrics = folder / "checkpoint.safetensors", folder / "metrics.csv"
    write_checkpoint(path, {"step": 3}, {"network": {"weight": torch.rand(4)}})
    write(metrics, "step,loss,restarts\n1,0.5,0\n2,0.4,0\n")
    return Reader([path, metrics], lambda: [attempt(lambda: read_checkpoint(path)), cut_metrics(metrics, 2)])


def bench_recipe(folder: Path) -> Reader:
    path = write(folder / "recipe.toml", text(pictures(folder / "images", 1)))
    return Reader([path], lambda: read_recipe(path))


READERS: Mapping[str, Callable[[Path], Reader]] = {
    "attribution": attribution,
    "bench recipe": bench_recipe,
    "DiffMask recipe": training_recipe("diffmask", DiffMaskRecipe),
    "Shapley recipe": training_recipe("shapley", ShapleyRecipe),
    "manifest": manifest,
    "exported run": exported,
    "DiffMask explainer": explainer(DiffMask),
    "Shapley explainer": explainer(ViTShapley),
    "label files": label_files,
    "labels, boxes, COCO": annotations,
    "preprocessing": preprocessing,
    "race": race,
    "checkpoint": checkpoint,
}


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns; None if it is refused in one sentence."""
    try:
        return call()
    except pl.PatchlightError as error:
        sentence = str(error)
    assert "\n" not in sentence.strip(), f"more than one sentence: {sentence}"
    return None


def edited(data: st.DataObject, content: bytes) -> bytes:
    """Content with up to three changed tokens or bytes, or cut, or replaced."""
    match data.draw(st.sampled_from(["tokens", "tokens", "tokens", "bytes", "cut", "odd"])):
        case "tokens":
            for _ in range(data.draw(st.integers(1, 3))):
                tokens = list(TOKEN.finditer(content[:20_000]))
                if tokens:
                    token = tokens[data.draw(st.integers(0, len(tokens) - 1))]
                    content = content[: token.start()] + data.draw(st.sampled_from(JUNK)) + content[token.end() :]
            return content
        case "bytes":
            place = data.draw(st.integers(0, max(0, len(content) - 1)))
            return content[:place] + data.draw(st.binary(max_size=8)) + content[place + data.draw(st.integers(0, 8)) :]
        case "cut":
            return content[: data.draw(st.integers(0, len(content)))]
        case _:
            return data.draw(st.sampled_from(ODD))


def damaged(data: st.DataObject, path: Path, content: bytes) -> bytes:
    """Edited content; of safetensors, mostly an edited header of the right length."""
    if path.suffix == ".safetensors" and data.draw(st.booleans()):
        length = int.from_bytes(content[:8], "little")
        header = edited(data, content[8 : 8 + length])
        return struct.pack("<Q", len(header)) + header + content[8 + length :]
    return edited(data, content)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_refused_or_works(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind](tmp_path)
    reader.read()
    sound = {path: path.read_bytes() for path in reader.files}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(reader.files))
        path.write_bytes(reader.seal(damaged(data, path, sound[path])))
        start = time.process_time()
        try:
            attempt(reader.read)
        finally:
            spent = time.process_time() - start
            for each, content in sound.items():
                each.write_bytes(content)
        assert spent < SECONDS, f"{path.name} took {spent:.1f} s"

    check()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < MEMORY, f"{grown / 2**20:.0f} MiB"

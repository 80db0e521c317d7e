"""The user's images with classes, boxes and masks, in common forms."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess
from patchlight.data import Data, Sources, load_batch, open_data, takes_classes
from patchlight.data.spec import DataSpec, kind_and_path

from .files import picture, save_array, write

HEADER = "image,xmin,ymin,xmax,ymax\n"
WHOLE = Preprocess((30, 40), (0.5,) * 3, (0.5,) * 3, crop_pct=1.0, fit="squash")


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(PatchlightError) as error:
        open_data("files", path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def unreadable(data: Data) -> list[str]:
    batch = load_batch(data, range(len(data)), WHOLE)
    assert not batch.names
    return [said for _, said in batch.failures]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images of 40 x 30."""
    for name in ("a.png", "b.jpg"):
        picture(tmp_path / "set" / name)
    return tmp_path / "set"


def mask(path: Path, value: int = 1, size: tuple[int, int] = (40, 30), **more: int) -> Path:
    """0 except in a block of 10 x 10 in the upper left corner."""
    drawn = np.zeros((size[1], size[0]))
    drawn[:10, :10] = value
    drawn[-1] = more.get("last", 0)
    return save_array(path, drawn)


def coco(path: Path, *annotations: dict[str, Any], images: list[dict[str, Any]] | None = None) -> Path:
    listed = images or [{"id": 1, "file_name": "a.png", "width": 40, "height": 30}, {"id": 2, "file_name": "b.jpg"}]
    categories = [{"id": 5, "name": "zebra"}, {"id": 2, "name": "yak"}, {"id": 9, "name": "ant"}]
    return write(path, json.dumps({"images": listed, "annotations": annotations, "categories": categories}))


ZEBRA = {"image_id": 1, "category_id": 5, "bbox": [4, 2, 20, 10], "segmentation": [[4, 2, 24, 2, 24, 12, 4, 12]]}
YAK = {"image_id": 1, "category_id": 2, "bbox": [0, 0, 5, 5], "segmentation": [[0, 0, 5, 0, 5, 5, 0, 5]]}
ANT = {"image_id": 2, "category_id": 9, "bbox": [1, 1, 2, 2]}


def test_folder_is_another_name(folder: Path) -> None:
    assert open_data("folder", folder).names == open_data("files", folder).names == ["a.png", "b.jpg"]
    assert kind_and_path(f"files:{folder}") == ("files", str(folder))
    assert kind_and_path(f"folder:{folder}") == ("folder", str(folder))
    spec = DataSpec(kind="folder", options={"boxes": "boxes.csv"})
    assert spec.at(f"files:{folder}").options == spec.options, "what a recipe says of one holds for the other"
    assert takes_classes("files")
    assert takes_classes("folder")
    assert not takes_classes("pets")


def test_labels_boxes_and_masks_in_files_of_their_own(folder: Path) -> None:
    write(folder / "labels.csv", "a.png,hen\nb.jpg,cock\n")
    write(folder / "places.csv", HEADER + "a.png,1,2,11,12\nb,0,0,5,5\na,20,20,30,29.5\n")
    mask(folder / "outlines" / "a.png", 255, last=128)
    mask(folder / "outlines" / "b.png")
    options = {"labels": "labels.csv", "boxes": "places.csv", "masks": "outlines"}
    data = open_data("files", folder, **options)
    assert (data.names, data.labels) == (["a.png", "b.jpg"], ["cock", "hen"]), "masks are no images"
    first, second = data
    assert (first.label, second.label) == (1, 0)
    assert first.boxes is not None
    assert first.boxes.tolist() == [[1, 2, 11, 12], [20, 20, 30, 29.5]]
    assert first.mask is not None
    assert int((first.mask == 1).sum()) == 100 + 40, "anything but 0 is the object"
    ignoring = open_data("files", folder, **options, ignore=128)[0].mask
    assert ignoring is not None
    assert (int((ignoring == 1).sum()), int((ignoring == -1).sum())) == (100, 40)
    by_model = open_data("files", folder, **options, classes=["hen", "fox", "cock"])
    assert [sample.label for sample in by_model] == [0, 2]
    again = pickle.loads(pickle.dumps(data))[0]
    assert again.label == first.label, "another process can read it"


def test_everything_is_optional_and_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    boxes = write(tmp_path / "elsewhere" / "boxes.csv", HEADER + "a,1,2,3,4\nb,1,2,3,4\n")
    data = open_data("files", folder, boxes=boxes)
    assert data.labels is None
    assert [(s.label, s.mask, s.boxes is None) for s in data] == [(None, None, False)] * 2


def test_a_folder_laid_out_needs_no_options(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "x" / "a.png")
    picture(tmp_path / "images" / "y" / "a.png")
    alone = open_data("files", tmp_path)
    assert alone.names == ["images/x/a.png", "images/y/a.png"], "it is but a folder"
    mask(tmp_path / "masks" / "x" / "a.png")
    mask(tmp_path / "masks" / "y" / "a.png", last=1)
    write(tmp_path / "boxes.csv", HEADER + "x/a,0,0,10,10\ny/a,0,0,40,30\n")
    data = open_data("files", tmp_path)
    assert (data.names, data.labels) == (["x/a.png", "y/a.png"], ["x", "y"]), "the sub-folder is the class"
    assert [int((s.mask == 1).sum()) for s in data if s.mask is not None] == [100, 140]
    write(tmp_path / "labels.csv", "x/a,3\ny/a,1\n")
    assert [s.label for s in open_data("files", tmp_path)] == [3, 1]
    other = write(tmp_path / "others.csv", "x/a,2\ny/a,2\n")
    assert [s.label for s in open_data("files", tmp_path, labels=other)] == [2, 2], "what is given wins"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
def test_masks_of_every_mode(mode: str, folder: Path) -> None:
    drawn = Image.new("L", (40, 30))
    drawn.paste(255, (0, 0, 10, 10))
    stored = drawn.convert("I").convert(mode) if mode == "I;16" else drawn.convert(mode)
    if mode == "P":
        stored = Image.fromarray((np.asarray(drawn) > 0).astype(np.uint8), "P")
        stored.putpalette([200, 10, 10, 0, 0, 0])  # colours that say the contrary
    for name in ("a", "b"):
        (folder / "masks").mkdir(exist_ok=True)
        stored.save(folder / "masks" / f"{name}.png")
    for sample in open_data("files", folder, masks="masks"):
        assert sample.mask is not None
        assert int(sample.mask.sum()) == int(sample.mask[:10, :10].sum()) == 100


def test_coco_gives_classes_boxes_and_masks(folder: Path) -> None:
    coco(folder / "coco.json", YAK, ZEBRA, ANT)
    data = open_data("files", folder, coco="coco.json")
    assert data.labels == ("yak", "zebra", "ant"), "in the order of their numbers"
    first, second = data
    assert (first.label, second.label) == (1, 2)
    assert first.boxes is not None
    assert first.boxes.tolist() == [[4, 2, 24, 12]], "those of its class"
    assert first.mask is not None
    assert int(first.mask.sum()) == int(first.mask[2:12, 4:24].sum()) == 200
    assert second.mask is None
    by_model = open_data("files", folder, coco="coco.json", classes=["ant", "bee", "zebra"])
    assert [s.label for s in by_model] == [2, 0]
    write(folder / "labels.csv", "a,yak\nb,bee\n")
    relabelled = open_data("files", folder, coco="coco.json", labels="labels.csv")[0]
    assert relabelled.boxes is not None
    assert relabelled.boxes.tolist() == [[0, 0, 5, 5]], "those of the class it was given"
    write(folder / "labels.csv", "a,bee\nb,bee\n")
    foreign = open_data("files", folder, coco="coco.json", labels="labels.csv")[0]
    assert foreign.boxes is not None
    assert len(foreign.boxes) == 2, "of no category: all"
    write(folder / "boxes.csv", HEADER + "a,1,1,2,2\nb,1,1,2,2\n")
    mask(folder / "masks" / "a.png")
    mask(folder / "masks" / "b.png")
    own = open_data("files", folder, coco="coco.json", boxes="boxes.csv", masks="masks")[0]
    assert own.boxes is not None
    assert own.mask is not None
    assert (own.label, own.boxes.tolist(), int(own.mask.sum())) == (1, [[1, 1, 2, 2]], 100), "files of their own win"


def test_coco_of_a_whole_set_beside_some_of_its_images(folder: Path) -> None:
    listed = [{"id": i, "file_name": f"val/{name}"} for i, name in enumerate(("c.jpg", "a.png", "b.jpg"))]
    coco(folder / "coco.json", {**ZEBRA, "image_id": 0}, ANT, images=listed)
    assert [s.label for s in open_data("files", folder, coco="coco.json")] == [None, 2]


def test_what_is_said_of_one_image_is_said_of_no_other(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/1.png"):
        picture(tmp_path / "set" / name)
    options = {
        "labels": write(tmp_path / "labels.csv", "1,hen\n"),
        "boxes": write(tmp_path / "boxes.csv", HEADER + "1.png,1,2,3,4\n"),
        "masks": mask(tmp_path / "masks" / "1.png").parent,
        "coco": coco(tmp_path / "coco.json", images=[{"id": 1, "file_name": "1.png"}]),
    }
    for option, place in options.items():
        with pytest.raises(PatchlightError, match=r"has one \w+, '1', for two images, 'a/1.png' and 'b/1.png'"):
            open_data("files", tmp_path / "set", **{option: place})
    own = write(tmp_path / "own.csv", "a/1.png,hen\n1,cock\n")
    assert [one.label for one in open_data("files", tmp_path / "set", labels=own)] == [1, 0]
    picture(tmp_path / "set" / "1.png")
    with pytest.raises(PatchlightError, match=r"for two images, '1.png' and 'b/1.png'; give each its own, by path"):
        open_data("files", tmp_path / "set", labels=own)


def test_what_is_wrong_is_reported_when_it_is_opened(folder: Path) -> None:
    write(folder / "boxes.csv", HEADER + "a,1,2,3,4\n")
    assert "boxes.csv' has no line for image 'b.jpg'; add one or remove the image" in refused(folder, boxes="boxes.csv")
    write(folder / "boxes.csv", "image,x,y,w,h\na,1,2,3,4\n")
    assert "has no column xmin; its header must name image, xmin, ymin, xmax, ymax" in refused(
        folder, boxes="boxes.csv"
    )
    write(folder / "boxes.csv", HEADER + "a,1,2,3,4\nb,1,2,three,4\n")
    assert "has 'three' instead of a number" in refused(folder, boxes="boxes.csv")
    mask(folder / "masks" / "a.png")
    assert "masks' has no PNG for image 'b.jpg'; add one or remove the image" in refused(folder, masks="masks")
    assert "'absent' does not exist; give the folder of masks" in refused(folder, masks="absent")
    coco(folder / "coco.json", images=[{"id": 1, "file_name": "a.png"}])
    assert "coco.json' has no entry for image 'b.jpg'" in refused(folder, coco="coco.json")
    coco(folder / "coco.json", {**ANT, "image_id": 77})
    assert "annotations[0]" in refused(folder, coco="coco.json")
    assert "has the unknown image id 77" in refused(folder, coco="coco.json")
    write(folder / "coco.json", "{")
    assert "is not valid JSON" in refused(folder, coco="coco.json")
    said = refused(folder, boxes="coco.json")
    assert "was given as boxes, which takes a CSV file; give COCO's JSON as coco" in said
    assert "was given as coco, which takes a JSON file" in refused(folder, coco="boxes.csv")
    assert "has no option 'annotations'" in refused(folder, annotations="coco.json")


def test_what_is_wrong_with_one_image_is_reported_when_it_is_read(folder: Path) -> None:
    write(folder / "boxes.csv", HEADER + "a,1,2,60,4\nb,5,5,5,9\n")
    outside, flat = unreadable(open_data("files", folder, boxes="boxes.csv"))
    assert outside == "a box of 'a.png' is (1, 2, 60, 4), outside its image of 40 x 30"
    assert flat == "a box of 'b.jpg' is (5, 5, 5, 9); give xmin < xmax and ymin < ymax"
    odd = {**ZEBRA, "segmentation": [[4, 2, 24, 2, 24]]}
    coco(folder / "coco.json", odd, {**ANT, "bbox": [30, 20, 30, 20]})
    polygon, outside = unreadable(open_data("files", folder, coco="coco.json"))
    assert polygon == "a polygon of 'a.png' has 5 coordinates; give x, y, x, y, …"
    assert outside == "a box of 'b.jpg' is (30, 20, 60, 40), outside its image of 40 x 30"
    resized = [{"id": 1, "file_name": "a.png", "width": 80, "height": 60}, {"id": 2, "file_name": "b.jpg"}]
    runs = {**ANT, "segmentation": {"size": [40, 30], "counts": [1000, 200]}}
    coco(folder / "coco.json", ZEBRA, runs, images=resized)
    smaller, turned = unreadable(open_data("files", folder, coco="coco.json"))
    assert smaller == "'a.png' was 80 x 60 when it was annotated, but is 40 x 30; give the same image"
    assert turned == "the mask of 'b.jpg' is 30 x 40, but its image 40 x 30"


def test_sources_tell_what_reading_depends_on(folder: Path) -> None:
    """Sources are equal if and only if outlines, boxes, masks and `ignore` are; no image is opened."""

    def sources(**options: Any) -> Sources:
        data = open_data("files", folder, **options)
        assert data.sources is not None
        return data.sources("a.png")

    assert sources() == sources()
    assert (sources().files, sources().annotations) == ([folder / "a.png"], set())
    coco(folder / "coco.json", ZEBRA, ANT)
    first = sources(coco="coco.json")
    assert first == sources(coco="coco.json")
    assert first.annotations == {"labels", "boxes", "masks"}
    assert open_data("files", folder, coco="coco.json").sources("b.jpg").annotations == {"labels", "boxes"}  # type: ignore[misc]
    assert json.dumps(first.values), "plain values"
    coco(folder / "coco.json", {**ZEBRA, "segmentation": [[4, 2, 24, 2, 24, 11, 4, 12]]}, ANT)
    assert sources(coco="coco.json").values != first.values
    coco(folder / "coco.json", {**ZEBRA, "bbox": [4, 2, 20, 9]}, ANT)
    assert sources(coco="coco.json").values != first.values
    coco(folder / "coco.json", ZEBRA, {**ANT, "bbox": [0, 0, 1, 1]})
    assert sources(coco="coco.json") == first, "another image's annotation"
    boxes = write(folder.parent / "boxes.csv", HEADER + "a,1,2,3,4\nb,1,2,3,4\n")
    assert sources(boxes=boxes).annotations == {"boxes"}
    assert sources(boxes=boxes).values != sources().values
    masks = mask(folder.parent / "outlines" / "a.png").parent
    mask(masks / "b.png")
    assert sources(masks=masks).files == [folder / "a.png", masks / "a.png"]
    assert sources(masks=masks, ignore=255).values != sources(masks=masks).values


def test_metrics_of_every_annotation(folder: Path) -> None:
    outline = {**ANT, "segmentation": [[1, 1, 20, 1, 20, 20, 1, 20]], "bbox": [1, 1, 19, 19]}
    coco(folder / "coco.json", ZEBRA, outline)
    vit = pl.load("pocket")
    batch = load_batch(open_data("files", folder, coco="coco.json"), range(2), vit)
    found = pl.evaluate(
        vit, batch.images, "random", ["pointing-game", "ap"], boxes=batch.boxes, masks=batch.masks, target=0
    )
    assert all(len(each.values) == 2 for each in found.values())

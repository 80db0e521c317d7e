"""ImageNet's validation set in all layouts, with small files, and a thousand real images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess
from patchlight.data import Data, Sample, batches, open_data
from tests.reference import shared_dir

from .files import picture, write

NAMES = ["ILSVRC2012_val_00000001", "ILSVRC2012_val_00000003"]
GOLDFISH, TENCH = "n01443537", "n01440764"  # classes 1 and 0
XML = """<annotation><folder>val</folder><filename>{name}</filename>
<size><width>{width}</width><height>{height}</height><depth>3</depth></size>
{objects}</annotation>"""
OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    for name in NAMES:
        picture(tmp_path / "set" / "images" / f"{name}.JPEG")
    return tmp_path / "set"


def by_name(data: Data) -> list[Sample]:
    """Samples sorted by name; the data set is sorted by class."""
    labels = [sample.label for sample in data]
    assert labels == sorted(labels, key=lambda label: -1 if label is None else label)
    return sorted(data, key=lambda sample: sample.name)


def refused(path: Path, **options: object) -> str:
    with pytest.raises(PatchlightError) as error:
        open_data("imagenet", path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def unreadable(path: Path, **options: object) -> str:
    with pytest.raises(PatchlightError) as error:
        list(open_data("imagenet", path, **options))
    return str(error.value)


def test_folders_named_by_synset(tmp_path: Path) -> None:
    picture(tmp_path / "val" / TENCH / f"{NAMES[1]}.JPEG")
    picture(tmp_path / "val" / GOLDFISH / f"{NAMES[0]}.JPEG")
    for root in (tmp_path, tmp_path / "val"):
        data = open_data("imagenet", root)
        assert {s.name: s.label for s in data} == {NAMES[0]: 1, NAMES[1]: 0}
        assert data[0].boxes is None
        assert data.labels is not None
        assert len(data.labels) == 1000
        assert "tench" in data.labels[0]
    picture(tmp_path / "val" / TENCH / f"{NAMES[0]}.JPEG")
    assert "1 images of the same name" in refused(tmp_path)


def test_flat_without_labels_is_refused(flat: Path) -> None:
    assert "no classes for the images in" in refused(flat)
    assert "does not exist; give a file" in refused(flat, labels=flat / "absent.csv")


def test_boxes_csv(flat: Path) -> None:
    header = "image,class_index,synset,xmin,ymin,xmax,ymax,width,height\n"
    first, second = f"{NAMES[0]},1,{GOLDFISH},2.5,3,30,20,40,30\n", f"{NAMES[1]},0,{TENCH},10,20,50,60,80,60\n"
    boxes = write(flat / "boxes.csv", header + first + f"{NAMES[0]},1,{GOLDFISH},0,0,5,5,40,30\n" + second)
    data = by_name(open_data("imagenet", flat))
    assert [s.label for s in data] == [1, 0]
    assert data[0].boxes is not None
    assert data[0].boxes.tolist() == [[2.5, 3, 30, 20], [0, 0, 5, 5]]
    assert data[1].boxes is not None
    assert data[1].boxes.tolist() == [[5, 10, 25, 30]], "drawn on a copy of twice the size"
    write(boxes, header + first)
    assert f"boxes.csv' has no line for image '{NAMES[1]}'" in refused(flat)
    write(boxes, header + first + second.replace(",0,n", ",1000,n"))
    assert f"'{NAMES[1]}' has class '1000'; give 0 to 999 or a synset" in refused(flat)
    write(boxes, header + first.replace("2.5", "left") + second)
    assert "has 'left' instead of a number" in refused(flat)
    write(boxes, header + first.replace("40,30", "60,80") + second)
    assert "refer to an image of 60 x 80 pixels, but it has 40 x 30, with other proportions" in unreadable(flat)
    write(boxes, header + first.replace("30,20,", "30,3,") + second)
    assert "give xmin < xmax and ymin < ymax" in unreadable(flat)
    write(boxes, header.replace("ymax", "bottom") + first)
    assert "has no column ymax" in refused(flat)


def test_loc_val_solution(flat: Path) -> None:
    text = (
        f"ImageId,PredictionString\n{NAMES[1]},{TENCH} 1 2 11 12 {TENCH} 3 4 13 14 \n{NAMES[0]},{GOLDFISH} 0 0 9 9 \n"
    )
    solution = write(flat / "LOC_val_solution.csv", text)
    data = by_name(open_data("imagenet", flat))
    assert [s.label for s in data] == [1, 0]
    assert data[1].boxes is not None
    assert data[1].boxes.tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]]
    write(solution, text.replace(" 9 9 ", " 9 "))
    assert "write synset xmin ymin xmax ymax" in refused(flat)
    write(solution, text.replace(GOLDFISH, "n99999999"))
    assert "has class 'n99999999'" in refused(flat)


def test_xml(flat: Path) -> None:
    folder = flat / "Annotations" / "CLS-LOC" / "val"
    two = OBJECT.format(GOLDFISH, 4, 6, 20, 30) + OBJECT.format(GOLDFISH, 0, 0, 80, 60)
    first = write(folder / f"{NAMES[0]}.xml", XML.format(name=NAMES[0], width=80, height=60, objects=two))
    assert f"no boxes for image '{NAMES[1]}'" in refused(flat)
    one = OBJECT.format(TENCH, 1, 2, 30, 20)
    write(folder / f"{NAMES[1]}.xml", XML.format(name=NAMES[1], width=40, height=30, objects=one))
    data = by_name(open_data("imagenet", flat))
    assert [s.label for s in data] == [1, 0]
    assert data[0].boxes is not None
    assert data[0].boxes.tolist() == [[2, 3, 10, 15], [0, 0, 40, 30]]
    labels = write(flat / "val.txt", f"{NAMES[0]}.JPEG 5\n{NAMES[1]}.JPEG {GOLDFISH}\n")
    assert [s.label for s in by_name(open_data("imagenet", flat, labels=labels, boxes=folder))] == [5, 1]
    bomb = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;&b;&b;">]><annotation>&c;</annotation>'
    for text, sentence in {
        bomb: "declares a document type",
        "<annotation><object>": "is not valid XML",
        "<annotation></annotation>": "has no object",
        XML.format(name="", width=40, height=30, objects=one.replace("<xmin>1</xmin>", "")): "instead of a number",
        XML.format(name="", width=40, height=30, objects=one.replace(">30<", ">99<")): "outside its image of 40 x 30",
    }.items():
        write(first, text)
        assert sentence in unreadable(flat, labels=labels)


def test_the_official_ground_truth_needs_its_table(flat: Path) -> None:
    kit = flat.parent / "ILSVRC2012_devkit_t12" / "data"
    truth = write(kit / "ILSVRC2012_validation_ground_truth.txt", "2\n1\n1\n")
    assert "has the class numbers of the development kit, not those of models" in refused(flat)
    table = write(kit / "map_clsloc.txt", f"{TENCH} 1 tench\n{GOLDFISH} 2 goldfish\n")
    assert [s.label for s in by_name(open_data("imagenet", flat))] == [1, 0], "line 1 is image 1, line 3 image 3"
    table.unlink()
    rows = [(1, GOLDFISH), (2, TENCH), (1001, "n00001740")]
    savemat(kit / "meta.mat", {"synsets": np.array(rows, dtype=[("ILSVRC2012_ID", object), ("WNID", object)])})
    assert [s.label for s in open_data("imagenet", flat, labels=truth)] == [0, 1]
    write(truth, "2\n1\n7\n")
    assert f"'{NAMES[1]}' has class 7 in" in refused(flat)
    write(truth, "2\n1\n")
    assert f"has no line for image '{NAMES[1]}'; its 2 lines" in refused(flat)
    (kit / "meta.mat").write_bytes(b"not MATLAB")
    assert "is not the meta.mat" in refused(flat)


def test_a_thousand_real_images() -> None:
    data = open_data("imagenet", shared_dir() / "data" / "imagenet-val-1000")
    assert len(data) == 1000
    tis = Preprocess((224, 224), crop_pct=0.875, fit="squash", interpolation="bilinear")
    labels: list[int] = []
    for batch in batches(data.select(every=20), tis, 25, workers=2):
        assert batch.failures == []
        assert batch.boxes is not None
        assert batch.labels is not None
        labels += batch.labels.tolist()
        for boxes in batch.boxes:
            assert boxes.numel()
            assert float(boxes.min()) >= 0
            assert float(boxes.max()) <= 224
            assert bool((boxes[:, 2:] > boxes[:, :2]).all())
    assert len(set(labels)) == 50


@pytest.mark.slow
def test_every_real_image_can_be_read() -> None:
    data = open_data("imagenet", shared_dir() / "data" / "imagenet-val-1000")
    made = list(batches(data, Preprocess((224, 224), crop_pct=0.9), 50, workers=2))
    assert [failure for batch in made for failure in batch.failures] == []
    labels = torch.cat([batch.labels for batch in made if batch.labels is not None])
    assert sorted(labels.tolist()) == list(range(1000)), "one image a class"

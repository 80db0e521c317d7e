"""Batches of samples: order, threads, annotations on the model's input, and unreadable samples."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess, open_image
from patchlight.data import Batch, Data, Sample, batches, labelled, load_batch, open_data

from .files import picture, write

SMALL = Preprocess((32, 32))


def one(sample: Sample, labels: list[str] | None = None) -> Data:
    return Data("toy", [sample.name], lambda name: sample, labels)


def blank(width: int = 40, height: int = 30) -> Image.Image:
    return Image.new("RGB", (width, height))


def refused(sample: Sample, labels: list[str] | None = None) -> str:
    """The error of `data[0]`, which is also recorded in a batch."""
    data = one(sample, labels)
    with pytest.raises(PatchlightError) as error:
        data[0]
    batch = load_batch(data, [0], SMALL)
    assert batch.failures == [(sample.name, str(error.value))]
    assert batch.images.shape == (0, 3, 32, 32)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_boxes_that_cannot_be_of_the_image() -> None:
    box = torch.tensor([[1.0, 2.0, 60.0, 20.0]])
    assert refused(Sample("a", blank(), boxes=box)) == "a box of 'a' is (1, 2, 60, 20), outside its image of 40 x 30"
    assert "outside its image" in refused(Sample("a", blank(), boxes=torch.tensor([[-9.0, 2, 6, 20]])))
    for flat in ([5.0, 2, 5, 20], [5.0, 20, 9, 2], [float("nan"), 2, 9, 20]):
        assert "give xmin < xmax and ymin < ymax" in refused(Sample("a", blank(), boxes=torch.tensor([flat])))
    slack = one(Sample("a", blank(), boxes=torch.tensor([[-0.5, 0, 40.6, 31]])))[0]
    assert slack.boxes is not None
    assert slack.boxes.tolist() == [[0, 0, 40, 30]], "a pixel beyond the edge is rounding, and clipped"


def test_masks_that_cannot_be_of_the_image() -> None:
    empty = torch.zeros(30, 40, dtype=torch.int8)
    assert refused(Sample("a", blank(), mask=empty)) == "the mask of 'a' has no object; remove the image"
    turned = torch.ones(40, 30, dtype=torch.int8)
    assert refused(Sample("a", blank(), mask=turned)) == "the mask of 'a' is 30 x 40, but its image 40 x 30"
    assert refused(Sample("a", blank(), label=2), ["x", "y"]) == "'a' has class 2; the classes of 'toy' are 0 to 1"


def test_a_mask_whose_object_the_crop_cut_away_is_a_failure() -> None:
    mask = torch.zeros(30, 90, dtype=torch.int8)
    mask[:, :10] = 1
    batch = load_batch(one(Sample("a", blank(90), mask=mask)), [0], SMALL)
    assert batch.failures == [("a", "the mask of 'a' has no object inside the model's crop")]


def test_a_box_the_crop_cut_away_leaves_an_empty_list() -> None:
    sample = Sample("a", blank(90), label=3, boxes=torch.tensor([[0.0, 0, 10, 30]]))
    batch = load_batch(one(sample), [0], SMALL)
    assert batch.boxes is not None
    assert batch.boxes[0].shape == (0, 4)
    assert (batch.names, batch.failures) == (["a"], [])
    assert batch.labels is not None
    assert (batch.labels.tolist(), batch.labels.dtype) == ([3], torch.int64)


def test_the_largest_region_is_that_on_the_models_input() -> None:
    regions = torch.full((30, 90), -1, dtype=torch.int16)
    regions[:, :35] = 7  # nearly all of it left of the crop, which is columns 30 to 60
    regions[:, 40:55] = 12
    mask = (regions == 7).to(torch.int8)
    batch = load_batch(one(Sample("a", blank(90), label=7, mask=mask, regions=regions)), [0], Preprocess((30, 30)))
    assert batch.labels is not None
    assert batch.labels.tolist() == [12]
    assert batch.masks is not None
    assert torch.equal(batch.masks[0], (regions[:, 30:60] == 12).to(torch.int8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eleven images of two classes; one is truncated."""
    generator = np.random.default_rng(0)
    for i in range(11):
        path = tmp_path / "set" / ("cat" if i % 2 else "dog") / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (24, 30, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:500])
    return tmp_path / "set"


def test_batches_are_the_images_in_order(folder: Path) -> None:
    data = open_data("folder", folder)
    assert data.labels == ["cat", "dog"]
    assert data.names[:2] == ["cat/01.png", "cat/03.png"]
    made: dict[int, list[Batch]] = {workers: list(batches(data, SMALL, 4, workers)) for workers in (0, 3)}
    for plain, threaded in zip(made[0], made[3], strict=True):
        assert plain.names == threaded.names
        assert torch.equal(plain.images, threaded.images)
        assert plain.failures == threaded.failures
    names = [name for batch in made[3] for name in batch.names]
    assert names == data.names[:-1], "the damaged image, last by name, is left out"
    ((name, sentence),) = made[3][-1].failures
    assert name == "dog/10.png"
    assert "damaged or truncated" in sentence
    labels = torch.cat([batch.labels for batch in made[3] if batch.labels is not None])
    assert labels.tolist() == [0] * 5 + [1] * 5
    assert made[0][0].boxes is None
    assert made[0][0].masks is None
    torch.testing.assert_close(made[0][0].images[1], SMALL.tensor(open_image(folder / "cat/03.png")))


def test_a_model_gives_its_own_preprocessing(folder: Path) -> None:
    vit = pl.load("pocket")
    batch = load_batch(open_data("folder", folder), [2, 0], vit, workers=2)
    assert batch.names == ["cat/05.png", "cat/01.png"]
    torch.testing.assert_close(batch.images, vit.batch([folder / n for n in batch.names]))


def test_threads_leave_the_warning_filters_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`catch_warnings` restores the earlier filters, which in a thread may be those of another thread."""
    users = []
    original = warnings.catch_warnings

    def watched(*args: Any, **options: Any) -> Any:
        users.append(threading.current_thread())
        return original(*args, **options)

    monkeypatch.setattr(warnings, "catch_warnings", watched)
    list(batches(open_data("folder", folder), SMALL, 2, workers=4))
    assert {thread.name for thread in users} <= {threading.main_thread().name}


def test_an_abandoned_loop_ends(folder: Path) -> None:
    made = batches(open_data("folder", folder), SMALL, 2, workers=2)
    assert len(next(made).names) == 2
    made.close()  # type: ignore[attr-defined]


def test_select(folder: Path) -> None:
    data = open_data("folder", folder)
    assert data.select(every=4).names == [data.names[i] for i in (0, 4, 8)]
    assert data.select([5, 1, 3]).select([2, 0]).names == [data.names[3], data.names[5]]
    assert data.select([5, 1, 3])[1].name == data.names[1]
    with pytest.raises(PatchlightError, match="no sample 11 in data set 'set'; it has 0 to 10"):
        data.select([0, 11])
    with pytest.raises(PatchlightError, match="every=0 is not a valid step"):
        data.select(every=0)
    with pytest.raises(PatchlightError, match="batch size 0 is not possible"):
        batches(data, SMALL, 0)


def test_two_samples_of_one_name_are_refused() -> None:
    with pytest.raises(PatchlightError, match="two samples called 'b'"):
        Data("toy", ["a", "b", "b"], lambda name: Sample(name, blank()))


def test_unknown_kinds_and_options(tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match="no data set is called 'imagenets'; did you mean 'imagenet-s'"):
        open_data("imagenets", tmp_path)
    picture(tmp_path / "a.png")
    with pytest.raises(PatchlightError, match="has no option 'label'; did you mean 'labels'"):
        open_data("folder", tmp_path, label=write(tmp_path / "l.csv", "a,1"))


def test_a_sample_without_annotations_leaves_the_others_theirs() -> None:
    mask = torch.zeros(90, 90, dtype=torch.int8)
    mask[20:60, 20:60] = 1
    box = torch.tensor([[20.0, 20.0, 60.0, 60.0]])
    samples = {"a": Sample("a", blank(90, 90), 3, box, mask), "b": Sample("b", blank(90, 90))}
    batch = load_batch(Data("two", ["a", "b"], samples.__getitem__), [0, 1], SMALL)
    assert batch.labels is not None
    assert batch.labels.tolist() == [3, -1]
    assert batch.boxes is not None
    assert [len(boxes) for boxes in batch.boxes] == [1, 0]
    assert batch.masks is not None
    assert bool((batch.masks[0] == 1).any())
    assert bool((batch.masks[1] == -1).all())
    kept = labelled(batch)
    assert kept.names == ["a"]
    assert kept.failures == [("b", "'b' has no label")]
    none = labelled(load_batch(Data("one", ["b"], samples.__getitem__), [0], SMALL))
    assert (none.names, none.failures) == ([], kept.failures)

"""Datasets of torch: pairs, dicts, detection targets, all forms of images, and errors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision import tv_tensors
from torchvision.transforms.functional import to_tensor

from patchlight.bench.plan import plan
from patchlight.bench.recipe import parse
from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess
from patchlight.data import Sample, from_dataset, load_batch

from .files import picture

WIDTH, HEIGHT = 12, 8
PIXELS = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


class Pairs(Dataset[Any]):
    """A Dataset of given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def only(item: Any, **options: Any) -> Sample:
    return from_dataset(Pairs(item), **options)[0]


def refused(item: Any, **options: Any) -> str:
    with pytest.raises(PatchlightError) as error:
        only(item, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "image",
    [
        PICTURE,
        PIXELS,
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        to_tensor(PICTURE),
        to_tensor(PICTURE).double(),
        tv_tensors.Image(PICTURE),
        PIXELS / 255,
    ],
    ids=["PIL", "array", "uint8", "float", "double", "tv", "float array"],
)
def test_every_form_of_an_image_is_the_same_picture(image: Any) -> None:
    for item in (image, (image, 3), [image, 3], {"image": image, "label": 3}):
        assert np.array_equal(np.asarray(only(item).image), PIXELS)


def test_grey_images_and_paths(tmp_path: Path) -> None:
    grey = torch.arange(6, dtype=torch.uint8).view(2, 3)
    for image in (grey, grey[None], grey.numpy(), grey.numpy()[..., None], grey / 255):
        assert np.array_equal(np.asarray(only(image).image), grey.numpy()[..., None].repeat(3, 2))
    assert only(picture(tmp_path / "a.png")).image.size == (40, 30)
    assert only((str(tmp_path / "a.png"), 2)).label == 2


@pytest.mark.parametrize("label", [2, np.int64(2), torch.tensor(2), torch.tensor([2]), "cat", None])
def test_labels(label: Any) -> None:
    found = only((PICTURE, label), labels=["ape", "bat", "cat"])
    assert found.label == (None if label is None else 2)


def test_names_and_class_names() -> None:
    pairs = Pairs((PICTURE, 0), (PICTURE, 1))
    data = from_dataset(pairs)
    assert (data.name, data.names, data.labels) == ("Pairs", ["000000", "000001"], None)
    pairs.classes = ["ape", "bat"]  # as torchvision's data sets have them
    data = from_dataset(pairs, names=["x", "y"])
    assert (data.names, data.labels, data.read("y").label) == (["x", "y"], ["ape", "bat"], 1)
    assert from_dataset(pairs, labels=["a", "b"]).labels == ["a", "b"]
    assert from_dataset(TensorDataset(torch.zeros(2, 3, 4, 4)))[1].label is None
    assert from_dataset(Subset(pairs, [1]))[0].label == 1
    assert from_dataset([(PICTURE, 1)])[0].label == 1
    assert from_dataset(TensorDataset(torch.zeros(2, 3, 4, 4), torch.tensor([5, 6])))[1].label == 6
    assert pickle.loads(pickle.dumps(data))[1].label == 1
    with pytest.raises(PatchlightError, match="1 names were given for 2 samples"):
        from_dataset(pairs, names=["x"])
    with pytest.raises(PatchlightError, match="two samples called 'x'"):
        from_dataset(pairs, names=["x", "x"])
    with pytest.raises(PatchlightError, match="'000001' has class 1; the classes of 'Pairs' are 0 to 0"):
        from_dataset(pairs, labels=["a"])[1]


def test_dicts_have_boxes_and_a_mask() -> None:
    mask = torch.zeros(HEIGHT, WIDTH)
    mask[2:4, 3:6] = 1
    mask[0] = -1
    boxes = [[3, 2, 6, 4]]
    for about in ({"boxes": boxes, "mask": mask}, {"boxes": torch.tensor(boxes), "mask": mask[None].to(torch.int8)}):
        for item in ({"image": PICTURE, "label": 1, **about}, (PICTURE, {"label": 1, **about})):
            found = only(item)
            assert found.label == 1
            assert found.boxes is not None
            assert found.boxes.tolist() == boxes
            assert found.mask is not None
            assert torch.equal(found.mask, mask.to(torch.int8))
    drawn = Image.fromarray((mask > 0).byte().numpy() * 255)
    for given in (drawn, mask > 0, (mask > 0).byte() * 255):
        found = only({"image": PICTURE, "mask": given})
        assert found.mask is not None
        assert torch.equal(found.mask == 1, mask == 1)


def detection(**changes: Any) -> dict[str, Any]:
    """Three objects, two of class 4; one of these has the largest box, and class 7 has the largest mask."""
    masks = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    masks[0, 0, 0], masks[1, 4:, 4:], masks[2, 1, 1] = 1, 1, 1
    boxes = torch.tensor([[0, 0, 12, 8], [4, 4, 12, 8], [1, 1, 2, 2]]).float()
    return {"boxes": boxes, "labels": torch.tensor([4, 7, 4]), "masks": masks, **changes}


def test_detection_targets_are_of_the_largest_objects_class() -> None:
    by_mask = only((to_tensor(PICTURE), detection()))
    assert by_mask.label == 7
    assert by_mask.boxes is not None
    assert by_mask.boxes.tolist() == [[4, 4, 12, 8]]
    assert by_mask.mask is not None
    assert int(by_mask.mask.sum()) == int(by_mask.mask[4:, 4:].sum()) == 32
    by_box = only((PICTURE, detection(masks=None)))
    assert (by_box.label, by_box.mask) == (4, None)
    assert by_box.boxes is not None
    assert by_box.boxes.tolist() == [[0, 0, 12, 8], [1, 1, 2, 2]]
    given = only((PICTURE, detection(label=4)))
    assert given.mask is not None
    assert int(given.mask.sum()) == 2
    boxes = tv_tensors.BoundingBoxes(detection()["boxes"], format="XYXY", canvas_size=(HEIGHT, WIDTH))
    assert only((PICTURE, detection(boxes=boxes, masks=None))).label == 4
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "masks": torch.zeros(0, 8, 12)}
    assert only((PICTURE, none)) == Sample("000000", only((PICTURE, none)).image)


def test_what_is_refused() -> None:
    normalised = (to_tensor(PICTURE) - 0.5) / 0.25
    said = refused((normalised, 1))
    assert said.startswith("the image of '000000' has values from -2 to 2; give uint8")
    assert "uint8 values from 0 to 255, or floats from 0 to 1" in said
    assert "values from 0 to 255" in refused(PIXELS.astype(np.float32))
    assert "from nan to nan" in refused(torch.full((3, 4, 4), torch.nan))
    assert "has values of type int64" in refused(torch.zeros(3, 4, 4, dtype=torch.long))
    assert "has shape [5, 4, 3]; give [C,H,W] or [H,W]" in refused(torch.zeros(5, 4, 3))
    assert "has shape [3, 5, 6]; give [H,W,C] or [H,W]" in refused(np.zeros((3, 5, 6)))
    assert "the image of '000000' is a int" in refused(5)
    assert "has the keys 'pixel_values', 'label', but not 'image'" in refused({"pixel_values": PICTURE, "label": 1})
    assert "the label of '000000' is of shape [10]" in refused((PICTURE, torch.zeros(10)))
    assert "the label of '000000' is of type float" in refused((PICTURE, 1.5))
    assert "has the unknown class 'cta'; did you mean 'cat'?" in refused((PICTURE, "cta"), labels=["cat"])
    assert "are XYXY of shape [2, 3]; give [n,4]" in refused({"image": PICTURE, "boxes": torch.zeros(2, 3)})
    boxes = tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYWH", canvas_size=(HEIGHT, WIDTH))
    assert "are XYWH of shape [1, 4]" in refused({"image": PICTURE, "boxes": boxes})
    assert "outside its image of 12 x 8" in refused({"image": PICTURE, "boxes": [[0, 0, 30, 2]]})
    assert "has shape [2, 8, 12]; give [H,W]" in refused({"image": PICTURE, "mask": torch.ones(2, HEIGHT, WIDTH)})
    assert "the mask of '000000' is 8 x 12" in refused({"image": PICTURE, "mask": torch.ones(WIDTH, HEIGHT)})
    assert "3 labels and 1 boxes" in refused((PICTURE, detection(boxes=[[0, 0, 1, 1]])))
    assert "but none of its objects has" in refused((PICTURE, detection(label=5)))


class Broken(Pairs):
    def __getitem__(self, index: int) -> Any:
        if index:
            raise KeyError("no such\nthing")
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_an_item_that_raises_is_left_out_of_its_batch() -> None:
    data = from_dataset(Broken(PICTURE, PICTURE))
    batch = load_batch(data, range(2), Preprocess((8, 8), (0.5,) * 3, (0.5,) * 3), workers=2)
    assert batch.names == ["000000"]
    ((name, said),) = batch.failures
    assert name == "000001"
    assert said.startswith("sample '000001' of the data set cannot be read: KeyError: ")
    assert "\n" not in said
    with pytest.raises(PatchlightError, match="a Stream has no length; give a Dataset with an item for each index"):
        from_dataset(Stream())


class Counted(Pairs):
    """Detects simultaneous reads by two threads."""

    inside, clash = 0, False

    def __getitem__(self, index: int) -> Any:
        Counted.inside += 1
        Counted.clash |= Counted.inside > 1
        torch.randn(64, 64) @ torch.randn(64, 64)
        item = super().__getitem__(index)
        Counted.inside -= 1
        return item


def test_items_are_read_one_at_a_time() -> None:
    data = from_dataset(Counted(*[PICTURE] * 40))
    batch = load_batch(data, range(40), Preprocess((8, 8), (0.5,) * 3, (0.5,) * 3), workers=4)
    assert len(batch.names) == 40
    assert not Counted.clash


def test_the_benchmark_plans_it(tmp_path: Path) -> None:
    recipe = parse(
        'name = "own"\nmodels.Pocket = "pocket"\ndata = {kind = "files"}\nmethods.R = "random"\n'
        'metrics.Del = {metric = "deletion", steps = 2}\n'
    )

    def planned(*items: Any) -> Any:
        return plan(recipe, data=from_dataset(Pairs(*items)))

    other: Tensor = torch.from_numpy(PIXELS).permute(2, 0, 1).flip(1)
    first, same, changed = planned(PICTURE, PICTURE), planned(PICTURE, PIXELS), planned(PICTURE, other)
    assert first == same, "what is hashed is the content"
    assert first != changed

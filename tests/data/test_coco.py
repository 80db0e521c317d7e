"""COCO's JSON: outlines compared with masks by hand and with a literal decoder and encoder, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patchlight.core.errors import PatchlightError
from patchlight.data.coco import Coco, Runs, draw, from_runs, inside, read_coco, unpack_counts

from .files import write


def columns(rows: list[str]) -> np.ndarray:
    """A mask from text; # is the object."""
    return np.array([[cell == "#" for cell in row] for row in rows])


RING = columns(
    [
        "......",
        ".####.",
        ".#..#.",
        ".####.",
    ]
)
RING_RUNS = [5, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 4]


def literal_runs(mask: np.ndarray) -> list[int]:
    """Lengths of the runs of equal pixels down each column, from a run of 0 on."""
    counts, value, length = [], False, 0
    for x in range(mask.shape[1]):
        for y in range(mask.shape[0]):
            if bool(mask[y, x]) != value:
                counts.append(length)
                value, length = not value, 0
            length += 1
    return [*counts, length]


def literal_word(counts: list[int]) -> str:
    """COCO's compressed form: two's complement, five bits per character."""
    word = ""
    for i, count in enumerate(counts):
        number = count - counts[i - 2] if i > 2 else count
        while True:
            five = number % 32
            number = (number - five) // 32
            done = (number == 0 and five < 16) or (number == -1 and five >= 16)
            word += chr(48 + five + (0 if done else 32))
            if done:
                break
    return word


def literal_mask(counts: list[int], width: int, height: int) -> np.ndarray:
    """The mask of runs, pixel by pixel down each column."""
    mask = np.zeros((height, width), bool)
    place = 0
    for i, count in enumerate(counts):
        for _ in range(count):
            mask[place % height, place // height] = i % 2 == 1
            place += 1
    return mask


def literal_inside(polygon: list[tuple[float, float]], width: int, height: int) -> np.ndarray:
    """Counts, for each pixel, the sides that a ray from its centre to the right crosses."""
    mask = np.zeros((height, width), bool)
    for row in range(height):
        for column in range(width):
            x, y, odd = column + 0.5, row + 0.5, False
            for (ax, ay), (bx, by) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
                if (ay > y) != (by > y) and x < ax + (y - ay) / (by - ay) * (bx - ax):
                    odd = not odd
            mask[row, column] = odd
    return mask


def test_runs_of_a_mask_drawn_by_hand() -> None:
    assert literal_runs(RING) == RING_RUNS
    assert np.array_equal(from_runs(RING_RUNS, (6, 4), "x"), RING)
    assert np.array_equal(from_runs([24], (6, 4), "x"), np.zeros((4, 6), bool))
    assert np.array_equal(from_runs([0, 24], (6, 4), "x"), np.ones((4, 6), bool))


def test_a_word_worked_out_by_hand() -> None:
    """13 is '='. 40 = 8 + 32 * 1: 'X', for 8 with more to come, and '1'. 3 - 40 = 27 - 32 * 2: 'k', for 27 with more to
    come, and 'N', for 30, which is -2 as its bit 16 is the sign."""
    assert unpack_counts("=X1=kN", "x") == [13, 40, 13, 3]
    assert literal_word([13, 40, 13, 3]) == "=X1=kN"


@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (3, 40), (61, 33)])
def test_runs_as_lists_and_as_words_against_the_literal_ones(density: float, size: tuple[int, int]) -> None:
    width, height = size
    mask = np.random.default_rng(width).random((height, width)) < density
    counts = literal_runs(mask)
    assert np.array_equal(literal_mask(counts, width, height), mask)
    word = literal_word(counts)
    assert unpack_counts(word, "x") == counts
    for given in (counts, word):
        assert np.array_equal(draw(Runs(size=(height, width), counts=given), size, "x"), mask)


def test_long_runs_take_several_characters() -> None:
    counts = [100_000, 5, 70_000, 1_000_000, 3, 40, 2_000_000]
    assert unpack_counts(literal_word(counts), "x") == counts


@pytest.mark.parametrize("seed", range(6))
def test_polygons_against_the_literal_ray(seed: int) -> None:
    """Corners may be outside the image and sides may cross; a pixel that is inside twice is outside."""
    rng = np.random.default_rng(seed)
    corners = rng.uniform(-6, 30, (int(rng.integers(3, 9)), 2))
    found = inside(corners, (23, 17))
    assert np.array_equal(found, literal_inside([tuple(c) for c in corners.tolist()], 23, 17))
    assert found.any()


def test_polygons_whose_pixels_are_plain_to_see() -> None:
    square = draw([[1, 1, 4, 1, 4, 3, 1, 3]], (6, 4), "x")
    assert np.array_equal(square, columns(["......", ".###..", ".###..", "......"]))
    both = draw([[0, 0, 2, 0, 2, 2, 0, 2], [1, 1, 4, 1, 4, 3, 1, 3]], (6, 4), "x")
    assert np.array_equal(both, columns(["##....", "####..", ".###..", "......"])), "parts are joined, and may overlap"


def told(**broken: Any) -> str:
    with pytest.raises(PatchlightError) as error:
        draw(broken.get("outline", [[0, 0, 3, 0, 3, 3]]), (6, 4), "cat.jpg")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_outlines_that_cannot_be() -> None:
    assert told(outline=[[1, 1, 4, 1, 4]]) == "a polygon of 'cat.jpg' has 5 coordinates; give x, y, x, y, …"
    assert told(outline=[[1, 1, 4, 1]]) == "a polygon of 'cat.jpg' has 2 corners; give at least three"
    assert "NaN or infinity" in told(outline=[[1, 1, 4, 1, float("nan"), 2]])
    assert "the mask of 'cat.jpg' is 4 x 6, but its image 6 x 4" in told(outline=Runs(size=(6, 4), counts=[24]))
    assert "have 20 pixels; 6 x 4 are 24" in told(outline=Runs(size=(4, 6), counts=[12, 8]))
    assert "a run of -2 pixels" in told(outline=Runs(size=(4, 6), counts=[26, -2]))
    assert "contain ' ', which is not valid" in told(outline=Runs(size=(4, 6), counts="5 3"))
    assert "truncated" in told(outline=Runs(size=(4, 6), counts="X"))


IMAGES = [{"id": 7, "file_name": "val/1.jpg", "width": 6, "height": 4}, {"id": 9, "file_name": "val/b/2.jpg"}]
CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}]
CAR = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 1, 3, 2], "segmentation": [[1, 1, 4, 1, 4, 3, 1, 3]]}
DOG = {"id": 2, "image_id": 7, "category_id": 18, "bbox": [0, 0, 1, 1], "area": 50.0, "segmentation": []}
CROWD = {
    **CAR,
    "id": 3,
    "iscrowd": 1,
    "bbox": [0, 0, 6, 4],
    "area": 99.0,
    "segmentation": {"size": [4, 6], "counts": [0, 24]},
}


def coco(folder: Path, *annotations: dict[str, Any], **parts: Any) -> Coco:
    whole = {"images": IMAGES, "categories": CATEGORIES, "annotations": annotations, **parts}
    return read_coco(write(folder / "coco.json", json.dumps(whole)))


def test_what_an_image_shows(tmp_path: Path) -> None:
    found = coco(tmp_path, CAR, DOG, CROWD)
    assert found.categories == ("car", "dog"), "in the order of their numbers"
    scene = found.of(["val/1.jpg"])["val/1.jpg"]
    assert scene.category() == "dog", "the largest, crowds aside: `area` counts before the box"
    cars = scene.of("car")
    boxes, mask = cars.boxes(), cars.mask((6, 4), "x")
    assert boxes is not None
    assert boxes.tolist() == [[1, 1, 4, 3]], "a crowd has no box"
    assert mask is not None
    assert mask.tolist() == [[-1] * 6, [-1, 1, 1, 1, -1, -1], [-1, 1, 1, 1, -1, -1], [-1] * 6]
    assert scene.of("dog").mask((6, 4), "x") is None
    both = scene.of(None).boxes()
    assert both is not None
    assert len(both) == 2
    empty = found.of(["2.jpg"])["2.jpg"]
    assert (empty.category(), empty.boxes(), empty.mask((6, 4), "x")) == (None, None, None)


def test_images_are_known_by_the_end_of_their_path(tmp_path: Path) -> None:
    found = coco(tmp_path, CAR)
    for name in ("val/1.jpg", "1.jpg", "1.png"):
        assert found.of([name])[name].category() == "car"
    for name in ("other/1.jpg", "3.jpg"):
        with pytest.raises(PatchlightError, match=f"coco.json' has no entry for image '{name}'; add one or remove the"):
            found.of([name])
    twins = [{"id": 1, "file_name": "a/1.jpg"}, {"id": 2, "file_name": "b/1.jpg"}]
    with pytest.raises(PatchlightError, match=r"no entry for image '1\.jpg'"):
        coco(tmp_path, images=twins).of(["1.jpg"])
    with pytest.raises(PatchlightError, match=r"one entry, 'val/1', for two images, '1\.jpg' and 'val/1\.jpg'"):
        found.of(["1.jpg", "val/1.jpg"])


@pytest.mark.parametrize(
    ("annotations", "parts", "said"),
    [
        ([{**CAR, "image_id": 8}], {}, "annotations[0] of '{}' has the unknown image id 8"),
        ([CAR, {**CAR, "category_id": 4}], {}, "annotations[1] of '{}' has the unknown category id 4"),
        ([], {"images": [*IMAGES, IMAGES[0]]}, "'{}' has two images with the id 7"),
        ([], {"categories": [CATEGORIES[0]] * 2}, "'{}' has two categories with the id 18"),
        ([], {"categories": [CATEGORIES[0], {"id": 1, "name": "dog"}]}, "'{}' has two categories called 'dog'"),
        ([{**CAR, "bbox": [1, 2, 3]}], {}, "'{}' is not COCO's JSON: annotations.0.bbox.3: Field required"),
        ([], {"images": None}, "'{}' is not COCO's JSON: images: Input should be a valid array"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, annotations: list[dict[str, Any]], parts: dict[str, Any], said: str
) -> None:
    with pytest.raises(PatchlightError) as error:
        coco(tmp_path, *annotations, **parts)
    assert str(error.value) == said.format(tmp_path / "coco.json")


def test_broken_json(tmp_path: Path) -> None:
    file = write(tmp_path / "coco.json", '{"images": [')
    with pytest.raises(PatchlightError, match=r"coco.json' is not valid JSON: EOF while parsing"):
        read_coco(file)
    with pytest.raises(PatchlightError, match="cannot be read: No such file"):
        read_coco(tmp_path / "absent.json")

"""Batches: checks before the training, and an order that depends only on seed and epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchlight.core.errors import PatchlightError
from patchlight.trained.batches import check_data, epoch_of, images_and_labels, length_of
from tests.trained.toys import batches, pictures, toy


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        ([], "no images to train on"),
        ([(pictures(4), torch.zeros(4))], "all of class 0"),
        ([(pictures(4), torch.tensor([0, 1, 2, 9]))], "label 9, but toy has 5 classes"),
        ([torch.zeros(2, 3, 8, 8)], r"this model takes \[B,3,16,16\]"),
        ([torch.full((2, 3, 16, 16), torch.nan)], "NaN or infinity"),
        (["cat.jpg"], "a batch is a str"),
        (iter([pictures(4)]), "iterated only once"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(loader: Any, told: str) -> None:
    with pytest.raises(PatchlightError, match=told):
        check_data(toy(), loader)


def test_one_class_is_enough_to_calibrate_on() -> None:
    check_data(toy(), [(pictures(4), torch.zeros(4))], "calibrate on")
    check_data(toy(), [pictures(4)])


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [int(label) for batch in epoch_of(batches(classes=24), seed, epoch) for label in batch[1]]

    state = torch.get_rng_state()
    first = order(0, 0)
    assert sorted(first) == list(range(24))
    assert order(0, 0) == first
    assert order(0, 1) != first
    assert order(1, 0) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loader_that_cannot_be_counted_is_reported() -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield pictures(2)

    assert length_of(batches(24, 4)) == 6
    with pytest.raises(PatchlightError, match="give settings with steps"):
        length_of(Endless())
    images, labels = images_and_labels(next(epoch_of(Endless(), 0, 0)))
    assert (len(images), labels) == (2, None)

"""The batches of a training: their form, their order, and checks before the first step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError


def images_and_labels(batch: Any) -> tuple[Tensor, Tensor | None]:
    """The images and labels of a batch; labels are None if the loader has none."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
        labels = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor) else None
        return batch[0], labels
    raise PatchlightError(f"a batch is a {type(batch).__name__}; give [B,C,H,W] tensors, or (images, labels) pairs")


def epoch_of(loader: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    """The batches of an epoch; the order of a shuffling loader depends only on the seed and the epoch."""
    order_seed = int(np.random.default_rng([seed, epoch, 7]).integers(2**62))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(order_seed)
        batches = iter(loader)
        first = next(batches, None)
    if first is not None:
        yield first
        yield from batches


LAST_EPOCH = 2**31
"""The number of the epoch for measurements after the last step, which determines the order of batches."""


def last_batches(loader: Iterable[Any], seed: int, count: int) -> Iterator[Any]:
    """The batches for measurements after the last step."""
    return itertools.islice(epoch_of(loader, seed, LAST_EPOCH), count)


def length_of(loader: Any) -> int:
    """The number of batches of a loader."""
    try:
        return len(loader)
    except TypeError as error:
        raise PatchlightError("the loader has no length; give settings with steps") from error


def check_data(vit: Anatomy, loader: Iterable[Any], use: str = "train on") -> None:
    """Check the first 8 batches: refuse a wrong shape, labels that the model does not have, and a single class."""
    from patchlight.core.images import to_batch

    if isinstance(loader, Iterator):
        raise PatchlightError("the loader can be iterated only once; give a DataLoader, or a list of batches")
    classes: set[int] = set()
    count, labelled = 0, True
    for batch in itertools.islice(epoch_of(loader, 0, 0), 8):
        images, labels = images_and_labels(batch)
        to_batch(images, vit.preprocess, vit.channels)
        count += len(images)
        labelled = labelled and labels is not None
        if labels is not None:
            classes |= set(labels.flatten().tolist())
    if count == 0:
        raise PatchlightError(f"there are no images to {use}; the loader is empty")
    if not labelled:
        return
    highest, last = max(classes), vit.outcomes - 1
    if highest > last:
        raise PatchlightError(f"the data has a label {highest}, but {vit.name} has {last + 1} classes (0 to {last})")
    if len(classes) == 1 and use == "train on":
        raise PatchlightError(
            f"the first {count} images are all of class {highest}; training needs several classes, in mixed order"
        )

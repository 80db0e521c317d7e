"""`choose_start` compares the first blocks of a method on the same images."""

from __future__ import annotations

import pytest
import torch

import patchlight as pl
from tests.close import close
from tests.families import images, shared


@pytest.mark.parametrize("method", ["decompx", "ixg.skipplus.libra"])
def test_the_best_mean_is_chosen(method: str) -> None:
    vit = shared("vit")
    batch = images(vit, 3)
    found = pl.choose_start(vit, batch, method, steps=4, target=1)
    values = []
    for start in range(vit.depth):
        att = pl.explain(vit, batch, method, target=1, start=start)
        values.append(pl.evaluate(vit, batch, att, "ins-del", steps=4).values)
    expected = torch.stack(values)
    close(torch.tensor(found.means).double(), expected.mean(1), 1e-6)
    best = int(expected.mean(1).argmax())
    assert found.start == best
    gains = expected[best] - expected
    close(torch.tensor(found.gains).double(), gains.mean(1), 1e-6)
    close(torch.tensor(found.errors).double(), gains.std(1) / 3**0.5, 1e-6)
    assert f"start={best} is best" in str(found)


def test_lower_is_better_for_an_error() -> None:
    vit = shared("vit")
    found = pl.choose_start(vit, images(vit, 2), "genatt", "max-sensitivity", starts=[0, 2], samples=2)
    assert found.start == found.starts[found.means.index(min(found.means))]
    assert min(found.gains) == 0


def test_methods_without_a_first_block_are_refused() -> None:
    vit = shared("vit")
    with pytest.raises(pl.PatchlightError, match="no first block"):
        pl.choose_start(vit, images(vit, 1), "gradcam")
    with pytest.raises(pl.PatchlightError, match="starts is empty"):
        pl.choose_start(vit, images(vit, 1), "genatt", starts=[])

"""`caap` against runs written out one by one, and where its value is known."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor

import patchlight as pl
from tests.close import close
from tests.families import images, shared


def wide(family: str) -> tuple[pl.Anatomy, Tensor]:
    vit = shared(family)
    return pl.wrap(copy.deepcopy(vit.model).double(), preprocess=vit.preprocess), images(vit, 2).double()


def written_out(vit: pl.Anatomy, image: Tensor, target: int, blocks: range, inserted: list[int]) -> float:
    """The logit of a grey image, with the inserted tokens of the image after each of the blocks."""
    places = [vit.prefix + i for i in inserted]
    with torch.no_grad():
        own, other = vit.embed(image[None]), vit.embed(torch.zeros_like(image)[None])
        for layer in range(vit.depth):
            own, other = vit.block(layer, own), vit.block(layer, other)
            if layer in blocks:
                other[:, places] = own[:, places]
        return float(vit.readout(other)[0, target])


@pytest.mark.parametrize("family", ["vit", "reg4-gap"])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (1, 2), (None, None)])
def test_the_method_is_its_runs_written_out(family: str, start: int | None, stop: int | None) -> None:
    vit, batch = wide(family)
    found = pl.explain(vit, batch, {"caap": {"start": start, "stop": stop}}, target=[[0, 3], [1, 2]])["caap"].scores
    blocks = range(0 if start is None else start, (1 if stop is None else stop) + 1)
    for i, targets in enumerate([[0, 3], [1, 2]]):
        for t, target in enumerate(targets):
            empty = written_out(vit, batch[i], target, blocks, [])
            each = [written_out(vit, batch[i], target, blocks, [k]) - empty for k in range(16)]
            close(found[i, t].flatten(), torch.tensor(each, dtype=torch.float64), 1e-6)


def test_a_window_inserts_its_neighbours() -> None:
    vit, batch = wide("vit")
    found = pl.explain(vit, batch[:1], {"caap": {"window": 3}}, target=1)["caap"].scores[0]
    corner = written_out(vit, batch[0], 1, range(2), [0, 1, 4, 5]) - written_out(vit, batch[0], 1, range(2), [])
    assert float(found[0, 0]) == pytest.approx(corner)


def test_an_image_that_is_the_context_adds_nothing() -> None:
    vit, batch = wide("vit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.DegenerateMap)  # a difference by rounding is not a constant map
        assert float(pl.explain(vit, batch[:1] * 0, "caap", target=1).scores.abs().max()) < 1e-12


def test_tokens_after_the_last_block_do_not_reach_the_class_token() -> None:
    vit, batch = wide("vit")
    with pytest.warns(pl.DegenerateMap):
        found = pl.explain(vit, batch[:1], "caap", target=1, start=2, stop=2).scores
    assert float(found.abs().max()) < 1e-12


def test_a_range_outside_the_blocks_is_refused() -> None:
    vit = shared("vit")
    for settings in ({"stop": 3}, {"start": 2, "stop": 1}):
        with pytest.raises(pl.Unsupported, match="not a range of the 3 blocks"):
            pl.explain(vit, images(vit, 1), "caap", **settings)
    with pytest.raises(pl.Unsupported, match="2 patches has no middle; give an odd number"):
        pl.explain(vit, images(vit, 1), "caap", window=2)

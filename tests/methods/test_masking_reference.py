"""Masking methods against what RISE's own code, captum and grad-cam gave on deit_tiny and real photographs."""

from __future__ import annotations

import pytest
import torch

from patchlight.methods import rise
from tests.close import close, near, ranked
from tests.literal.plain import maps
from tests.reference import deit_tiny, inputs, reference

EVERY = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
EVERY += [pytest.param(3, marks=pytest.mark.slow)]


def saved_grids(count: int = 500) -> rise.RandomGrids:
    saved = reference("rise500")
    grids, shifts = (torch.from_numpy(saved[key][:count]) for key in ("grid7", "shifts_xy"))
    return rise.RandomGrids(grids, shifts, (224, 224))


def test_rise_masks_are_the_authors() -> None:
    found = saved_grids().to(torch.zeros(1)).masks(torch.arange(20))
    theirs = torch.from_numpy(reference("rise500")["masks_u8_first20"])
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-6)


def test_rise_maps_from_the_authors_scores() -> None:
    saved = reference("rise500")
    scores = torch.from_numpy(saved["scores"])
    found = saved_grids().to(scores).weighted(scores) / (500 * 0.5)
    close(found, saved["maps"], 1e-5)


def test_rise_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the saved masks, the scores of the first twenty agree to 1e-4."""
    saved = reference("rise500")
    seen: list[torch.Tensor] = []
    inner = rise.score_masks
    monkeypatch.setattr(rise, "draw_grids", lambda n, *_: saved_grids(n))
    monkeypatch.setattr(rise, "score_masks", lambda *a: (seen.append(inner(*a)), seen[-1])[1])
    maps(deit_tiny(), inputs(2), "rise", saved["target"][:2].tolist(), samples=20)
    theirs = torch.from_numpy(saved["scores"][:2, :20])
    torch.testing.assert_close(seen[0][..., 0], theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("image", range(4))
def test_rise_whole(image: int, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = reference("rise500")
    monkeypatch.setattr(rise, "draw_grids", lambda n, *_: saved_grids(n))
    one = inputs()[image : image + 1]
    found = maps(deit_tiny(), one, "rise", [int(saved["target"][image])], samples=500)
    close(found, saved["maps"][image], 1e-4)


@pytest.mark.parametrize("image", EVERY)
def test_captum_occlusion(image: int) -> None:
    """captum gives each of the three channels the window's whole value, and the saved map is their sum.

    Each value is the difference of two logits, whose rounding is a share of the logit, whatever the difference.
    """
    saved = reference("captum_occlusion16")
    one = inputs()[image : image + 1]
    target = int(saved["target"][image])
    found = maps(deit_tiny(), one, "occlusion", [target], preset="captum")
    near(found, saved["maps"][image] / 3, 1e-5 * float(deit_tiny().logits(one)[0, target]))
    ranked(found, saved["maps"][image], 0.9999)


@pytest.mark.parametrize("image", EVERY)
def test_gradcam_score_cam(image: int) -> None:
    saved = reference("pgc_scorecam")
    one = inputs()[image : image + 1]
    found = maps(deit_tiny(), one, "score-cam", [int(saved["target"][image])])
    close(found, saved["maps"][image], 1e-4)

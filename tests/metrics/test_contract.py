"""The contract over every registered metric: one small model that is not square in CI, other kinds in test-all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Targets
from patchlight.metrics.base import METRICS, MapFunction, on_grid
from patchlight.testing import check_metric
from tests.families import HEADS, asked, images, shared
from tests.literal.toys import linear

FAMILIES = ("vit-wide", "siglip", "swin")
TOKENS = ("token-deletion", "token-insertion")
COUNT = 3


@dataclass(frozen=True)
class Scene:
    """Three images with an object in each: a box, the mask of an ellipse-like part of it, and a true class."""

    vit: Anatomy
    images: Tensor
    labels: list[int]
    boxes: list[list[list[int]]]
    masks: Tensor

    @property
    def region(self) -> Tensor:
        """The pixels in the boxes [B,H,W]."""
        found = torch.zeros(self.masks.shape)
        for i, some in enumerate(self.boxes):
            for left, top, right, bottom in some:
                found[i, top:bottom, left:right] = 1
        return found

    @property
    def share(self) -> Tensor:
        """The object's share of the labelled pixels [B]."""
        return (self.masks == 1).double().mean((1, 2)) / (self.masks >= 0).double().mean((1, 2))


@cache
def scene(family: str) -> Scene:
    vit = asked(family) if family in HEADS else shared(family)
    batch = images(vit, COUNT)
    height, width = vit.preprocess.size
    boxes = [
        [[2, 4, width // 2, height // 2 + 3]],
        [[width // 4, 0, width // 2, height], [0, 5, 9, 20]],
        [[1, 2, width - 2, height - 3]],
    ]
    masks = torch.zeros(COUNT, height, width, dtype=torch.long)
    masks[0, 6 : height // 2, 4 : width // 2] = 1
    masks[1, 3 : height - 9, width // 4 : width // 2] = 1
    masks[2, 5 : height - 5, 7 : width - 9] = 1
    masks[:, :, -4:] = -1
    labels = vit.logits(batch).argmax(1).tolist()
    labels[1] = (labels[1] + 1) % vit.classes
    return Scene(vit, batch, labels, boxes, masks)


def needed(scene: Scene, name: str) -> dict[str, Any]:
    """The annotations a metric asks for; where it takes boxes or masks, it gets boxes."""
    names = {need.split(" or ")[0] for need in METRICS[name].needs}
    if METRICS[name].ablates:
        names.add("labels")
    return {key: getattr(scene, key) for key in names}


def object_and_around(scene: Scene) -> tuple[Tensor, Tensor]:
    ripple = 0.01 * torch.rand(scene.masks.shape, generator=torch.Generator().manual_seed(0))
    heat = (scene.masks == 1).float() + ripple
    return heat, -heat


def boxed_and_around(scene: Scene) -> tuple[Tensor, Tensor]:
    corner = torch.zeros_like(scene.region)
    corner[:, -3:, -3:] = 1
    return scene.region, corner


def one_and_all(scene: Scene) -> tuple[Tensor, Tensor]:
    one, all_ = torch.zeros(COUNT, *scene.vit.grid), torch.ones(COUNT, *scene.vit.grid)
    one[:, 1, 1] = 1
    all_[:, 0, 0] = 0.9
    return one, all_


def whole_and_double(scene: Scene) -> tuple[Tensor, Tensor]:
    """Maps that sum to the logit of the prediction, and to twice as much."""
    score = scene.vit.logits(scene.images).amax(1)
    ramp = torch.arange(1.0, 1 + scene.vit.grid[0] * scene.vit.grid[1]).view(scene.vit.grid)
    maps = ramp / ramp.sum() * score[:, None, None]
    return maps, 2 * maps


def still_and_nervous(scene: Scene) -> tuple[MapFunction, MapFunction]:
    def still(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return torch.arange(vit.grid[0] * vit.grid[1]).float().view(1, *vit.grid).expand(len(given), -1, -1)

    def nervous(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return given[:, 0].mul(1e4).sin()

    return still, nervous


def model_and_image(scene: Scene) -> tuple[MapFunction, MapFunction]:
    def model(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        with torch.no_grad():
            last = vit.run(vit.embed(given), stop=vit.stage_end if vit.hierarchical else None)
            return vit.patches(last.sum(-1))

    def image(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return F.adaptive_avg_pool2d(given.mean(1), vit.grid)

    return model, image


def by_class_and_blind(scene: Scene) -> tuple[MapFunction, MapFunction]:
    def by_class(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        ramp = torch.arange(vit.grid[0] * vit.grid[1]).float().view(1, *vit.grid)
        return torch.sin(ramp * (1 + targets.index.cpu().float()[..., None])).expand(len(given), -1, -1)

    return by_class, still_and_nervous(scene)[0]


def levels_of_the_model(scene: Scene) -> tuple[MapFunction, MapFunction]:
    """Values that are orderly on the model alone, and on every other model alone."""
    first = next(scene.vit.model.parameters()).detach().clone()

    def method(orderly: bool) -> MapFunction:
        def maps(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
            same = torch.equal(next(vit.model.parameters()).to(first), first)
            ramp = torch.arange(vit.grid[0] * vit.grid[1]).float().view(1, *vit.grid).expand(len(given), -1, -1)
            return (ramp > 5).float() if same == orderly else ramp

        return maps

    return method(True), method(False)


def another_and_the_same_noise(scene: Scene) -> tuple[Tensor, Tensor]:
    size = scene.vit.preprocess.size
    same = torch.rand(10, *size, generator=torch.Generator().manual_seed(0))[:1].expand(COUNT, -1, -1)
    return torch.rand(COUNT, *size, generator=torch.Generator().manual_seed(9)), same


Pair = Callable[[Scene], tuple[Any, Any]]
PREFERS: dict[str, Pair] = {
    **dict.fromkeys(("pointing-game", "energy-pointing", "gt-known-loc", "top1-loc", "max-box-acc"), boxed_and_around),
    **dict.fromkeys(("ap", "relevance-rank", "pixel-accuracy", "miou", "map", "f1"), object_and_around),
    "sparseness": one_and_all,
    "completeness-error": whole_and_double,
    "max-sensitivity": still_and_nervous,
    "randomisation": model_and_image,
    "random-floor": another_and_the_same_noise,
    "class-similarity": by_class_and_blind,
    "stability": still_and_nervous,
    "random-entropy": levels_of_the_model,
}
"""Of each metric, maps of which it must prefer the first; those that take parts of images away: see below."""
OF_MAPS = sorted(set(METRICS) - {"fact", "other-objects"})
"""Metrics of maps of classes. `fact` reads a number that a method reports (tests/literal/test_vitcx.py), and
`other-objects` the detections of a detector (tests/anatomy/test_detectors.py)."""
ABLATING = sorted(name for name, entry in METRICS.items() if entry.ablates)


def loose(values: Tensor, scene: Scene) -> Tensor:
    """Values of images whose object covers less than half of them; the others have none."""
    return torch.where(scene.region.mean((1, 2)) < 0.5, values, torch.nan)


def whole_image_hits(scene: Scene) -> Tensor:
    """Whether the whole image, which is what noise above 0.2 spans, meets a box with an IoU of a half."""
    height, width = scene.masks.shape[1:]
    largest = [max((r - x) * (b - y) for x, y, r, b in some) for some in scene.boxes]
    return torch.tensor([float(size >= 0.5 * height * width) for size in largest]).double()


def known(scene: Scene) -> Tensor:
    return scene.vit.logits(scene.images).argmax(1) == torch.tensor(scene.labels)


def two_ious(scene: Scene) -> Tensor:
    """Half of object and background are above the mean: I / U = (p / 2) / (p + (1 - p) / 2)."""
    p = scene.share
    return (p / (1 + p) + (1 - p) / (2 - p)) / 2


def patches_of_object(scene: Scene) -> Tensor:
    """The share of the labelled patches that are half object."""
    object_, labelled = (on_grid(part.double(), scene.vit) for part in (scene.masks == 1, scene.masks >= 0))
    inside = (object_ >= labelled / 2) & (object_ > 0)
    return inside.double().sum((1, 2)) / (labelled > 0).double().sum((1, 2))


CHANCE: dict[str, Callable[[Scene], Tensor]] = {
    "pointing-game": lambda s: loose(s.region.double().mean((1, 2)), s),
    "energy-pointing": lambda s: loose(s.region.double().mean((1, 2)), s),
    "ap": lambda s: s.region.double().mean((1, 2)),
    "relevance-rank": patches_of_object,
    "pixel-accuracy": lambda s: torch.full((COUNT,), 0.5).double(),
    "miou": two_ious,
    "map": lambda s: torch.full((COUNT,), 0.5).double(),
    "f1": lambda s: 2 * s.share / (1 + 2 * s.share),
    "gt-known-loc": whole_image_hits,
    "top1-loc": lambda s: whole_image_hits(s) * known(s),
    "sparseness": lambda s: torch.full((COUNT,), 1 / 3).double(),
    **dict.fromkeys(
        ("ins-del", "srg", "saco", "faithfulness-correlation", "f-fidelity", "faithfulness-estimate"),
        lambda s: torch.zeros(COUNT).double(),
    ),
    "max-sensitivity": lambda s: torch.zeros(COUNT).double(),
    **dict.fromkeys(("randomisation", "class-similarity"), lambda s: torch.ones(COUNT).double()),
    **dict.fromkeys(("stability", "random-entropy"), lambda s: torch.zeros(COUNT).double()),
    "random-floor": lambda s: torch.zeros(COUNT).double(),
}
"""The value of maps drawn from U(0, 1), where it can be written down; of explainers, of one that draws so by seed."""


@pytest.mark.parametrize("name", OF_MAPS)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow if i else ()) for i, f in enumerate(FAMILIES)]
)
def test_contract(name: str, family: str) -> None:
    given = scene(family)
    better, worse = (None, None) if name in ABLATING else PREFERS[name](given)
    found = check_metric(
        name,
        given.vit,
        given.images,
        shared(family, torch.float64),
        better=better,
        worse=worse,
        chance=CHANCE[name](given) if name in CHANCE else None,
        **needed(given, name),
    )
    assert (found is None) == (family == "swin" and name in TOKENS), "refused"


def variants() -> list[tuple[str, dict[str, Any]]]:
    """Metrics that take parts of images away: as they are, by every preset, and where settings turn the direction."""
    found = [(name, given) for name in ABLATING for given in ({}, *({"preset": p} for p in METRICS[name].presets))]
    for direction in ("positive", "negative"):
        found += [("perturbation", {"direction": direction, "quantity": q}) for q in ("probability", "kl", "nll")]
    found += [("perturbation", {"integrator": how, "unit": "patch"}) for how in ("unit", "width")]
    found.remove(("faithfulness-estimate", {"preset": "nguyen"}))  # a map and its negative are alike to it
    found[found.index(("faithfulness-estimate", {}))][1]["score"] = "logit"  # one patch does not move the probability
    return found + [(name, {"quantity": "aopc", "form": f}) for name in TOKENS for f in ("area", "percent", "higher")]


@pytest.mark.parametrize(("name", "settings"), variants())
def test_parts_in_the_order_of_their_worth(name: str, settings: dict[str, Any]) -> None:
    """Of two classes whose logits are sums over pixels, the best order of removal is known: that of each pixel's share.

    Nothing stands where pixels are missing.
    """
    generator = torch.Generator().manual_seed(0)
    vit = linear(classes=2)
    batch = torch.randn(COUNT, 3, *vit.preprocess.size, generator=generator, dtype=torch.float64)
    labels = vit.logits(batch).argmax(1)
    weight = vit.model.weight.detach()
    worth = ((weight[labels] - weight[1 - labels]) * batch).sum(1)
    fills = {key: "zero" for key in ("fill", "deletion_fill") if key in METRICS[name].settings}
    given = {**fills, **settings}
    found = check_metric(name, vit, batch, None, given, labels=labels.tolist(), better=worth, worse=-worth)
    assert (found is None) == (settings.get("preset") == "vit-shapley"), "only that drops every token"


NO_PROBABILITY = ("neurons", "max-neurons", "cls-neurons")
LOGIT = {"quantity": "logit"}
WITHOUT = {"auc": {}, "lodds": {}, "perturbation": LOGIT, "road": LOGIT, **{t: {"quantity": "aopc"} for t in TOKENS}}
"""What cannot be read of a head that has no probabilities, and the settings with which it can; none for two."""


@pytest.mark.parametrize("name", OF_MAPS)
@pytest.mark.parametrize(
    "head", [pytest.param(h, marks=() if i < 3 else pytest.mark.slow) for i, h in enumerate(HEADS)]
)
def test_contract_on_heads(name: str, head: str) -> None:
    given, double = scene(head), asked(head, torch.float64)
    refused = head in NO_PROBABILITY and name in WITHOUT
    if refused:
        assert check_metric(name, given.vit, given.images, **needed(given, name)) is None
        if not WITHOUT[name]:
            return
    settings = WITHOUT[name] if refused else {}
    found = check_metric(name, given.vit, given.images, double, settings, **needed(given, name))
    assert found is not None
    if "score" in found.settings and METRICS[name].ablates:
        assert found.settings["score"] == ("logit" if head in NO_PROBABILITY else "probability")

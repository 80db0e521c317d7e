"""What the figures of DiffMask, TokenTM and ViT-CX show is what the methods and metrics say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

import patchlight as pl
from patchlight.data.counting import counting_grids
from patchlight.methods.cams import feature_maps
from patchlight.report.figures import draw
from patchlight.report.figures.counting import TINY, grids_to_show, train_task
from patchlight.report.figures.masks import ask_about
from patchlight.report.figures.numbers import numbers_of
from patchlight.study.counting import read_task
from patchlight.trained.diffmask import DiffMask
from patchlight.zoo import pocket

PHOTOS = sorted(pocket.PHOTOS.glob("*.jpg"))[:3]


@pytest.fixture(scope="module")
def vit() -> pl.Anatomy:
    return pl.load("pocket")


def words(fig: Figure) -> list[str]:
    return [text.get_text() for text in fig.texts]


def test_tokentm_has_a_row_for_every_method(vit: pl.Anatomy) -> None:
    fig = draw("tokentm-1", vit, PHOTOS[:1], progress=False)
    labels = ["Grad-CAM", "LRP", "Cons. LRP", "Trans. Attr.", "Raw Att.", "Rollout", "ATTCAT", "GAE", "TokenTM"]
    found = [word for word in words(fig) if word in labels]
    assert found == labels
    assert len(fig.axes) == 1 + len(labels) + 1, "the photograph, the maps and the bar of colours"


@pytest.mark.parametrize("name", ["diffmask-3", "diffmask-5"])
def test_diffmask_needs_gates_of_the_model(name: str, tmp_path: Path) -> None:
    other = pl.wrap(pocket.build(trained=False), name="another")
    images = torch.zeros(1, 3, *other.preprocess.size)
    with pytest.raises(pl.PatchlightError, match="needs a trained explainer"):
        draw(name, other, images, progress=False)
    with pytest.raises(pl.PatchlightError, match="DiffMask cannot explain another: the explainer was trained for"):
        draw(name, other, images, explainer=pocket.ZOO / "pocket-diffmask", progress=False)


@pytest.mark.parametrize(("name", "direction"), [("diffmask-5", "negative"), ("diffmask-6", "positive")])
def test_curves_are_those_of_the_metric(vit: pl.Anatomy, name: str, direction: str) -> None:
    fig = draw(name, vit, PHOTOS[:2], points=3, methods=["rollout"], progress=False)
    for axes, quantity in zip(fig.axes, ("nll", "probability"), strict=True):
        drawn = {str(one.get_label()): one.get_ydata() for one in axes.lines}
        for label, method in (("DiffMask", "diffmask"), ("rollout", "rollout")):
            asked: dict[str, Any] = {"preset": "diffmask", "points": 3, "direction": direction, "quantity": quantity}
            curve = pl.evaluate(vit, PHOTOS[:2], method, metric="perturbation", progress=False, **asked).curve
            assert curve is not None
            assert list(drawn[label]) == pytest.approx(curve.mean(0).tolist(), rel=1e-4)


def test_grids_shown_have_few_and_many_red_patches() -> None:
    held = counting_grids(60, 0, "test")
    chosen = grids_to_show(held, 5)
    assert len(set(chosen)) == 5
    red = held.labels[chosen].tolist()
    assert red == sorted(red) == [1, 3, 4, 6, 8]


@pytest.mark.slow
def test_a_counting_task_is_read_again(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(pl.PatchlightError, match="has no counting task"):
        read_task(tmp_path)
    vit, explainer = train_task(TINY, progress=False)
    save_file({k: v.contiguous() for k, v in vit.model.state_dict().items()}, tmp_path / "vit.safetensors")
    explainer.save(tmp_path / "diffmask")
    again, gates = read_task(tmp_path, TINY)
    assert isinstance(gates, DiffMask)
    images = counting_grids(4, 0, "test").images
    assert torch.equal(again.logits(images), vit.logits(images))


@pytest.mark.slow
def test_below_maps_stand_deletion_and_insertion(vit: pl.Anatomy) -> None:
    """Both over zeros after normalisation; the numbers also have insertion into RISE's blurred image."""
    fig = draw("vitcx-1", vit, PHOTOS[:1], steps=8, methods=["genatt", "rollout"], progress=False)
    att = pl.explain(vit, PHOTOS[:1], ["genatt", "rollout"], progress=False)
    metrics = {"Del": ("deletion", "zero"), "Ins": ("insertion", "zero"), "Ins (blur)": ("insertion", "blur-rise")}
    values = {
        (name, label): pl.evaluate(vit, PHOTOS[:1], one, m, preset="rise", steps=8, fill=fill, progress=False).mean
        for name, one in att.items()
        for label, (m, fill) in metrics.items()
    }
    least = min(values[name, "Del"] for name in att)
    most = max(values[name, "Ins"] for name in att)
    for name in att:
        deletion, insertion = values[name, "Del"], values[name, "Ins"]
        stars = ["*" if deletion == least else "", "*" if insertion == most else ""]
        assert f"{deletion:.3f}{stars[0]} / {insertion:.3f}{stars[1]}" in words(fig)
    told = {(one.series, one.quantity): one.value for one in numbers_of(fig)}
    assert told == pytest.approx(values)


def test_the_study_of_settings_inserts_into_an_empty_canvas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are what the model is given in column Ins; the blurred image is a line of its own."""
    vit, seen = pl.load("pocket"), []
    embed = type(vit).embed
    monkeypatch.setattr(vit, "embed", lambda x: (seen.append(x.clone()), embed(vit, x))[1])
    quick = {"steps": 2, "distances": [0.5], "deviations": [0.1], "blocks": [-1]}
    fig = draw("vitcx-sensitivity", vit, PHOTOS[:1], progress=False, **quick)
    empty = int((torch.cat(seen).flatten(1) == 0).all(1).sum())
    assert empty == 2 * 2, "of two maps, where insertion begins and where deletion ends"
    series = {one.series for one in numbers_of(fig)}
    assert series == {"Ins ↑", "Del ↓", "Ins (blur) ↑", "masks"}
    (remaining,) = (one for one in numbers_of(fig) if one.series == "masks")
    assert (remaining.x, remaining.quantity) == ("0.5", "masks that remain")


def test_figure_2_shows_attention_feature_maps_and_masks(vit: pl.Anatomy) -> None:
    fig = draw("vitcx-2", vit, PHOTOS[:1], channels=[3, 40], columns=2, progress=False)
    told = words(fig)
    assert {"channel 3", "channel 40", f"block {vit.depth - 1}, head 0"} <= set(told)
    shown = [axes.images[0].get_array() for axes in fig.axes]
    assert len(shown) == 7, "the image, and two of each"
    batch = vit.batch(PHOTOS[:1])
    features, _ = feature_maps(ask_about(vit, batch[0]))
    mask = F.interpolate(features[:, [3]], batch.shape[-2:], mode="bilinear")[0, 0]
    mask = (mask - mask.min()) / (mask.max() - mask.min())
    expected = np.asarray(vit.preprocess.picture((batch * mask)[0]))
    assert np.abs(shown[5].astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.slow
def test_the_sanity_curve_is_the_metrics(vit: pl.Anatomy) -> None:
    fig = draw("vitcx-sanity", vit, PHOTOS[:2], methods=["rollout"], columns=2, progress=False)
    (axes,) = (one for one in fig.axes if one.get_legend() is not None)
    curve = pl.evaluate(vit, PHOTOS[:2], "rollout", metric="randomisation", progress=False).curve
    assert curve is not None
    assert list(axes.lines[0].get_ydata()) == pytest.approx(curve.mean(0).tolist(), abs=1e-6)
    assert [tick.get_text() for tick in axes.get_xticklabels()][:3] == ["trained", "head", "norm"]


def test_a_mask_that_is_an_artefact_is_reported_with_its_scores(vit: pl.Anatomy) -> None:
    fig = draw("vitcx-5", vit, PHOTOS[:1], progress=False)
    told = " ".join(words(fig))
    assert told.count("CI = ") == 2
    assert told.count("s\u00a0=\u00a0") == 2


def test_a_file_without_the_cnns_weights_is_refused(vit: pl.Anatomy) -> None:
    weights = str(pocket.WEIGHTS)
    with pytest.raises(pl.PatchlightError, match="does not contain weights of resnet18"):
        draw("vitcx-4", vit, PHOTOS[:2], cnn="resnet18", cnn_weights=weights, progress=False)


@pytest.mark.slow
def test_masks_of_a_cnn_and_of_a_second_model_stand_beside_the_models_own(vit: pl.Anatomy, tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "cnn.safetensors")
    weights = str(tmp_path / "cnn.safetensors")
    other = pl.wrap(pocket.build(trained=False), name="untrained")
    fig = draw("vitcx-4", vit, PHOTOS[:2], other=other, cnn="test_resnet", cnn_weights=weights, progress=False)
    labels = fig.axes[0].get_legend_handles_labels()[1]
    assert labels == ["pocket", "untrained", "test_resnet", "random masks (RISE)"]
    assert not any("cnn_weights=FILE" in word for word in words(fig))


def test_images_without_a_box_are_left_out_of_localisation(vit: pl.Anatomy) -> None:
    boxes = [torch.tensor([[4.0, 4.0, 20.0, 20.0]]), torch.empty(0, 4), torch.tensor([[2.0, 2.0, 30.0, 30.0]])]
    asked_of = {"methods": ["rollout"], "examples": 1, "progress": False}
    fig = draw("vitcx-localisation", vit, PHOTOS, boxes=boxes, **asked_of)
    (whole,) = (one for one in numbers_of(fig) if one.quantity == "MaxBoxAccV2")
    assert whole.images == 2
    assert any("1 of 3 images have no box" in word for word in " ".join(words(fig)).split(". "))
    with pytest.raises(pl.PatchlightError, match="none of the images has a box"):
        draw("vitcx-localisation", vit, PHOTOS[:1], boxes=[torch.empty(0, 4)], **asked_of)

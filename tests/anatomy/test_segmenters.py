"""Models for segmentation, depth and masks, and questions about regions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.watching import Unseen
from patchlight.core.drawing.heat import outlined
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.testing import check_method, contract_names
from patchlight.zoo import shapes
from patchlight.zoo.pocket import PHOTOS
from tests import detectors

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"image_size": 64, "patch_size": 16}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
NECK = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}


def _swin(kind: str = "SwinConfig") -> Any:
    sizes = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [1] * 4, "num_heads": [2] * 4}
    return getattr(transformers, kind)(**sizes, window_size=2, out_features=STAGES)


def _segformer() -> Any:
    sizes = {"hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 32}
    return transformers.SegformerConfig(image_size=64, depths=[1] * 4, **sizes)


def _depth_anything() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    inner = transformers.Dinov2Config(**sizes, image_size=64, out_features=STAGES, reshape_hidden_states=False)
    more = {"reassemble_hidden_size": 32, "patch_size": 14, "head_hidden_size": 8}
    return transformers.DepthAnythingConfig(backbone_config=inner, **more, **NECK)


def _mask2former() -> Any:
    sizes = {"feature_size": 32, "hidden_dim": 32, "mask_feature_size": 32, "encoder_layers": 2, "decoder_layers": 3}
    sizes |= {"num_queries": 6, "dim_feedforward": 64, "encoder_feedforward_dim": 64, "num_attention_heads": 4}
    return transformers.Mask2FormerConfig(backbone_config=_swin(), **sizes)


def _maskformer() -> Any:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    decoder = transformers.DetrConfig(d_model=32, encoder_layers=1, decoder_layers=2, num_queries=6, **heads)
    return transformers.MaskFormerConfig(
        backbone_config=_swin("MaskFormerSwinConfig"), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32
    )


def _sam() -> Any:
    vision = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64, "patch_size": 16}
    vision |= {"window_size": 2, "global_attn_indexes": [2], "output_channels": 16, "num_pos_feats": 8, "mlp_dim": 64}
    prompt = {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    return transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)


def _sam2() -> Any:
    hiera = {"hidden_size": 16, "num_attention_heads": 1, "image_size": [64, 64], "blocks_per_stage": [1, 2, 2, 1]}
    hiera |= {"embed_dim_per_stage": [16, 32, 64, 128], "num_attention_heads_per_stage": [1, 2, 4, 8]}
    hiera |= {"window_size_per_stage": [4, 2, 4, 2], "global_attention_blocks": []}
    hiera |= {"window_positional_embedding_background_size": [4, 4], "model_type": "sam2_hiera_det_model"}
    vision = {"backbone_config": hiera, "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 32}
    vision |= {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    decoder = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    return transformers.Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)


def _dpt() -> Any:
    return transformers.DPTConfig(**SIZES, **NECK, backbone_out_indices=[0, 1, 2, 3], is_hybrid=False)


def _eomt() -> Any:
    sizes = {"mlp_ratio": 2, "num_blocks": 2, "num_queries": 6, "num_register_tokens": 2, "num_upscale_blocks": 1}
    return transformers.EomtConfig(**{**SIZES, "intermediate_size": None}, **sizes)


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "SegformerForSemanticSegmentation": (_segformer, (1, 2, 3, 4)),
    "DPTForSemanticSegmentation": (_dpt, (1, 2, 3, 4)),
    "DPTForDepthEstimation": (_dpt, (1, 2, 3, 4)),
    "DepthAnythingForDepthEstimation": (_depth_anything, (1, 2, 3, 4)),
    "BeitForSemanticSegmentation": (
        lambda: transformers.BeitConfig(**SIZES, out_indices=[1, 2, 3, 4]),
        (0, 1, 2, 3),
    ),
    "EomtForUniversalSegmentation": (_eomt, (2,)),
    "Mask2FormerForUniversalSegmentation": (_mask2former, (1, 2, 3, 4)),
    "MaskFormerForInstanceSegmentation": (_maskformer, (1, 2, 3, 4)),
    "UperNetForSemanticSegmentation": (
        lambda: transformers.UperNetConfig(backbone_config=_swin(), hidden_size=32, use_auxiliary_head=False),
        (1, 2, 3, 4),
    ),
    "SamModel": (_sam, (3,)),
    "Sam2Model": (_sam2, (1, 3, 5, 6)),
}
DPT, DEPTH, SAM = "DPTForSemanticSegmentation", "DPTForDepthEstimation", "SamModel"
EOMT, MASK2FORMER = "EomtForUniversalSegmentation", "Mask2FormerForUniversalSegmentation"
_OPENED: dict[str, Any] = {}


def _drawn(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(MODELS[kind][0]()).eval()
    with torch.no_grad():
        if kind == EOMT:
            model.attn_mask_probs.zero_()  # type: ignore[operator]
        for name, parameter in model.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            if kind == DPT and not name.startswith(
                "dpt"
            ):  # else nothing of the picture is left behind small convolutions
                parameter.mul_(3)
            if "Depth" in kind and name.startswith("head"):  # a ReLU at the end would leave nothing
                parameter.add_(0.1 if name.endswith("weight") else 1.0)
    return model


def opened(kind: str) -> Any:
    if kind not in _OPENED:
        side = 56 if kind.startswith("DepthAnything") else 64
        _OPENED[kind] = pl.wrap(_drawn(kind), preprocess=pl.Preprocess((side, side), fit="squash"))
    return _OPENED[kind]


def inputs(vit: Any, count: int = 1) -> Tensor:
    return torch.randn(count, 3, *vit.preprocess.size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", MODELS)
def test_the_states_read_and_the_parts(kind: str) -> None:
    vit = opened(kind)
    assert vit.reads == MODELS[kind][1]
    images = inputs(vit, 2)
    with vit.steady(), torch.no_grad():
        whole = vit.model_output(images)
        torch.testing.assert_close(vit.readout(vit.run(vit.embed(images))), whole, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(whole, vit.model_output(torch.zeros_like(images)), atol=1e-5)
    with pytest.raises(Unsupported, match="reads a whole grid, so no patch can be taken out"):
        vit.check_droppable()


@pytest.mark.parametrize("kind", [DPT, DEPTH, "DepthAnythingForDepthEstimation", MASK2FORMER])
def test_gradients_equal_autograd_through_the_plain_model(kind: str) -> None:
    vit = opened(kind)
    leaf = inputs(vit).requires_grad_()
    scores = vit.scores_of(vit.model(pixel_values=leaf))[0, 0]
    box = _box(0, 16, 32, 64)[: leaf.shape[2], : leaf.shape[3]]
    region = nn.functional.interpolate(box[None, None], tuple(scores.shape), mode="area")[0, 0]
    (gradient,) = torch.autograd.grad((scores * region).sum() / region.sum(), leaf)
    label = None if "Depth" in kind else 0
    head = pl.heads.Region(box=(0, 16, 32, 64), label=label, missed=True)
    att = pl.explain(vit, leaf.detach(), "grad", head=head, level="pixel", reduce="sum")
    torch.testing.assert_close(att.scores, gradient.sum(1), atol=1e-6, rtol=1e-3)


def _box(left: int, top: int, right: int, bottom: int) -> Tensor:
    mask = torch.zeros(64, 64)
    mask[top:bottom, left:right] = 1
    return mask


def _score(vit: Any, head: Any) -> float:
    image = inputs(vit)
    asked = vit.ask(head).prepared(image)
    return float(asked.logits(image)[0, 0])


def test_scores_of_regions() -> None:
    vit = opened(DPT)
    with torch.no_grad():
        scores = vit.model(inputs(vit)).logits[0]
    point = pl.heads.Region(point=(5, 9), label=1, missed=True)
    assert _score(vit, point) == pytest.approx(float(scores[1, 9, 5]), abs=1e-5)
    parts = [pl.heads.Region(box=(0, y, 64, y + 32), label=1, missed=True) for y in (0, 32)]
    whole = pl.heads.Region(box=(0, 0, 64, 64), label=1, missed=True)
    assert sum(_score(vit, part) for part in parts) / 2 == pytest.approx(_score(vit, whole), abs=1e-5)
    mask = pl.heads.Region(_box(0, 0, 64, 32), label=1, missed=True)
    assert _score(vit, mask) == pytest.approx(_score(vit, parts[0]), abs=1e-5)
    total = pl.heads.Region(box=(0, 0, 64, 64), label=1, missed=True, statistic="sum")
    assert _score(vit, total) == pytest.approx(4096 * _score(vit, whole), rel=1e-4)
    largest = pl.heads.Region(box=(0, 0, 64, 64), label=1, missed=True, statistic="max")
    assert _score(vit, largest) == pytest.approx(float(scores[1].max()), abs=1e-5)
    share = pl.heads.Region(box=(0, 0, 64, 64), label=1, missed=True, statistic="share")
    assert _score(vit, share) == pytest.approx(float((scores.argmax(0) == 1).float().mean()), abs=1e-5)


def test_depth_of_one_region_against_another() -> None:
    vit = opened(DEPTH)
    a, b = (0, 0, 32, 32), (32, 32, 64, 64)
    there, back = pl.heads.Region(box=a, against=b), pl.heads.Region(box=b, against=a)
    assert _score(vit, there) == pytest.approx(-_score(vit, back), abs=1e-5)
    assert _score(vit, there) != 0
    asked = vit.ask(there).prepared(inputs(vit)).question
    depth = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0))
    outputs = [transformers.modeling_outputs.DepthEstimatorOutput(predicted_depth=depth + more) for more in (0, 3)]
    torch.testing.assert_close(*(asked.read(output, 2)[0] for output in outputs), atol=1e-5, rtol=1e-5)


def test_the_mix_of_masks_is_that_of_the_processor() -> None:
    """It resizes masks to 384 x 384 pixels, and shows the class with the largest score."""
    vit, generator = opened(MASK2FORMER), torch.Generator().manual_seed(0)
    output = transformers.models.mask2former.modeling_mask2former.Mask2FormerForUniversalSegmentationOutput(
        class_queries_logits=torch.randn(1, 6, len(vit.class_names) + 1, generator=generator),
        masks_queries_logits=torch.randn(1, 6, 384, 384, generator=generator),
    )
    (shown,) = transformers.Mask2FormerImageProcessor().post_process_semantic_segmentation(output)
    assert torch.equal(vit.scores_of(output)[0].argmax(0), shown)


def test_attention_with_a_mask_for_each_head() -> None:
    """As in the decoder of Mask2Former, where every image of a batch has its own masks."""
    torch.manual_seed(0)
    attention, tokens = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    mask = torch.randn(6, 5, 5)
    plain, _ = attention(tokens, tokens, tokens, attn_mask=mask)
    with Unseen(torch.ones(1, 5, dtype=torch.bool)):
        watched, _ = attention(tokens, tokens, tokens, attn_mask=mask)
    torch.testing.assert_close(watched, plain)


def test_biases_behind_a_block_that_pools() -> None:
    """The last block of SAM 2 leaves fewer tokens than enter it."""
    vit = opened("Sam2Model")
    asked = vit.ask(pl.heads.Mask(points=(20, 30)))
    att = pl.explain(asked, inputs(vit), "fullgrad", progress=False)
    assert att.scores.shape[1:] == vit.grid
    assert att.scores.isfinite().all()


def test_the_mask_of_a_point_is_held() -> None:
    vit = opened(SAM)
    image = inputs(vit)
    asked = vit.ask(pl.heads.Mask(points=(20, 30))).prepared(image)
    with torch.no_grad():
        out = vit.model(pixel_values=image, input_points=torch.tensor([[[[20.0, 30.0]]]]))
    number = int(out.iou_scores[0, 0].argmax())
    mask = out.pred_masks[0, 0, number]
    assert asked.question.number == number
    assert float(asked.logits(image)[0, 0]) == pytest.approx(float(mask[mask > 0].mean()), abs=1e-4)
    leaf = image.clone().requires_grad_()
    out = vit.model(pixel_values=leaf, input_points=torch.tensor([[[[20.0, 30.0]]]]))
    (gradient,) = torch.autograd.grad(out.pred_masks[0, 0, number][mask > 0].mean(), leaf)
    head = pl.heads.Mask(points=[(20, 30)])
    att = pl.explain(vit, image, "grad", head=head, level="pixel", reduce="sum")
    torch.testing.assert_close(att.scores, gradient.sum(1), atol=1e-6, rtol=1e-3)
    row, column = (4 * (mask > 0).nonzero()[0]).tolist()  # another point of the mask
    assert vit.ask(pl.heads.Mask(points=(column + 1, row + 1))).prepared(image).question.number == number


def test_photographs_and_predicted_components() -> None:
    vit = opened(DPT)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 96, 3), dtype=np.uint8))
    small = pl.heads.Region(box=(0, 0, 48, 64))
    mask = np.zeros((128, 96), dtype=np.uint8)
    mask[:64, :48] = 255
    values = [pl.explain(vit, [picture], "ixg", head=head).scores for head in (small, pl.heads.Region(mask))]
    torch.testing.assert_close(*values, atol=1e-5, rtol=1e-3)
    found = pl.heads.Region(point=(40, 20), predicted=True)
    att = pl.explain(vit, [picture], "genatt", head=found)
    assert att.labels[0] in vit.class_names


def test_metrics_measure_a_region() -> None:
    vit = opened(DPT)
    att = pl.explain(vit, inputs(vit), "ixg", head=pl.heads.Region())
    assert pl.evaluate(vit, inputs(vit), att, "ins-del", steps=4).values.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"box": (80, 80, 90, 90)}, r"region \[80, 80, 90, 90\] lies outside the image, which is 64 pixels"),
        ({"point": (5, 64)}, "lies outside the image"),
        ({"box": (10, 10, 10, 20)}, r"region \[10, 10, 10, 20\] is empty"),
        ({"mask": torch.zeros(64, 64)}, "the region is empty"),
        ({"mask": torch.ones(8, 8)}, "the mask of the region is 8 x 8 pixels, and the image 64 x 64"),
        ({"mask": "none.png"}, "no image at 'none.png'"),
        ({"box": (0, 0, 9, 9), "label": "road"}, "has no label 'road'"),
        ({"box": (0, 0, 9, 9), "label": 7}, "label 7 does not exist"),
        ({"point": (1, 1), "against": [1]}, "a region is contrasted with another class"),
        ({"point": (1, 1), "against": True}, "label True is a bool; give an integer"),
        ({"point": (1, 1), "against": np.int64(7)}, "label 7 does not exist"),
        ({"box": (0, 0, 9, 9), "point": (1, 1)}, "box and point were given"),
        ({"statistic": "median"}, "setting statistic='median' of 'Region' is not valid"),
        ({"predicted": True}, "predicted=True needs point"),
    ],
)
def test_bad_regions(settings: dict[str, Any], reason: str) -> None:
    vit = opened(DPT)
    with pytest.raises(PatchlightError, match=reason):
        pl.explain(vit, inputs(vit), "ixg", head=pl.heads.Region(**settings))


def test_a_class_that_is_not_there() -> None:
    vit = opened(DPT)
    with torch.no_grad():
        best = vit.model(inputs(vit)).logits[0].argmax(0)
    x, y = 5, 9
    other = 1 - int(best[y, x])
    with pytest.raises(PatchlightError, match=r"has no class .* in this region: the largest share there is 100%"):
        pl.explain(vit, inputs(vit), "ixg", head=pl.heads.Region(point=(x, y), label=other))


def test_eomt_is_opened_at_the_blocks_that_have_its_queries() -> None:
    vit = opened(EOMT)
    assert (vit.depth, vit.prefix, vit.grid) == (2, 9, (4, 4))
    masked: Any = _drawn(EOMT)
    masked.attn_mask_probs.fill_(0.5)
    with pytest.raises(Unsupported, match="EoMT still masks attention by its own predictions"):
        pl.wrap(masked, preprocess=pl.Preprocess((64, 64)))


@pytest.mark.parametrize("kind", [DPT, EOMT, "SegformerForSemanticSegmentation"])
def test_no_patch_is_taken_out_of_a_grid(kind: str) -> None:
    """DPT itself would silently take nine of sixteen patches for a smaller picture."""
    with pytest.raises(Unsupported, match="reads a whole grid, so no patch can be taken out; pixels can be filled"):
        pl.explain(opened(kind), inputs(opened(kind)), "tis")


def test_tis_paints_patches_where_none_can_be_taken_out() -> None:
    """Its masks are clusters of the outputs of blocks, or of the stage at which a model is opened."""
    vit, photo = pl.load("pocket-segmenter"), PHOTOS / "dog.jpg"
    head = pl.heads.Region(box=(40, 40, 160, 160))
    assert pl.explain(vit, photo, "tis", head=head, unit="patch", samples=8).scores.std() > 0
    segformer = opened("SegformerForSemanticSegmentation")
    assert pl.explain(segformer, inputs(segformer), "tis", unit="patch", samples=8).scores.std() > 0
    with pytest.raises(Unsupported, match="'tis' does not work here"):
        pl.explain(segformer, inputs(segformer), "tis", unit="token")


def test_the_energy_of_a_map_in_a_region() -> None:
    """One of sixteen patches has all of the map; the region covers half of it."""
    vit, maps = opened(DPT), torch.zeros(1, 4, 4)
    maps[0, 1, 1] = 1
    head = pl.heads.Region(box=(24, 16, 32, 32), label=1, missed=True)
    measure = {"upsampling": "nearest"}
    energy = pl.evaluate(vit, inputs(vit), maps, "energy-pointing", head=head, **measure)
    assert energy.values.item() == pytest.approx(0.5)
    att = pl.explain(vit, inputs(vit), "ixg", head=head)
    region = vit.ask(head).prepared(inputs(vit)).question.regions[0]
    scores = att.scores.clamp(min=0)
    assert float(att.inside(region)) == pytest.approx(float(scores[0, 1, 1] / 2 / scores.sum()), abs=1e-6)


@pytest.mark.parametrize("insert", [False, True])
def test_only_the_context_is_removed(insert: bool) -> None:
    """The curve of a protected region, against painting the other patches by hand."""
    vit, maps = opened(DPT), torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
    head, image = pl.heads.Region(box=(16, 0, 33, 20), label=1, missed=True), inputs(vit)
    name = "insertion" if insert else "deletion"
    settings: dict[str, Any] = {"unit": "patch", "fill": "zero", "steps": None}
    found = pl.evaluate(vit, image, maps, name, head=head, protect=True, **settings)
    inside = torch.zeros(4, 4, dtype=torch.bool)
    inside[:2, 1:3] = True  # every patch that the box touches
    order = [i for i in maps.flatten().argsort(descending=True).tolist() if not inside.flatten()[i]]
    asked, values = vit.ask(head).prepared(image), []
    for count in range(len(order) + 1):
        hidden = torch.zeros(16)
        hidden[order[count:] if insert else order[:count]] = 1
        hidden = hidden.view(4, 4).repeat_interleave(16, 0).repeat_interleave(16, 1)
        with vit.steady(), torch.no_grad():
            values.append(float(asked.model_output(torch.where(hidden > 0, 0.0, image))[0, len(asked.labels)]))
    assert found.curve is not None
    torch.testing.assert_close(found.curve[0].double(), torch.tensor(values).double(), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_protected() -> None:
    vit = opened(DPT)
    box = pl.heads.Region(box=(0, 0, 64, 64), label=1, missed=True)
    with pytest.raises(PatchlightError, match="the protected object fills the image"):
        pl.evaluate(vit, inputs(vit), "random", "deletion", head=box, protect=True)
    with pytest.raises(Unsupported, match="protect=True needs a question about a box"):
        pl.evaluate(pl.load("pocket"), torch.zeros(1, 3, 32, 32), "random", "deletion", protect=True)
    depth = opened(DEPTH)
    with pytest.raises(PatchlightError, match="explains the complete image here; give a region"):
        pl.evaluate(depth, inputs(depth), "ixg", "energy-pointing", head=pl.heads.Region())


def test_a_missed_class_has_a_rival() -> None:
    vit = opened(DPT)
    with torch.no_grad():
        scores = vit.model(inputs(vit)).logits[0, :, 9, 5]
    won = int(scores.argmax())
    head = pl.heads.Region(point=(5, 9), label=1 - won, missed=True)
    asked = vit.ask(head).prepared(inputs(vit))
    assert list(asked.labels) == [vit.class_names[1 - won], vit.class_names[won]]
    maps = pl.explain(vit, inputs(vit), "grad", head=head, target=0, against=1, level="pixel", reduce="sum")
    alone = [pl.explain(vit, inputs(vit), "grad", head=head, target=i, level="pixel", reduce="sum") for i in (0, 1)]
    torch.testing.assert_close(maps.scores, alone[0].scores - alone[1].scores, atol=1e-6, rtol=1e-4)


def test_outlines_lie_on_the_border() -> None:
    region = torch.zeros(16, 16)
    region[4:8, 4:12] = 1
    drawn = np.array(outlined(Image.new("RGB", (320, 320), "red"), [region]))
    white = (drawn == 255).all(2)
    assert white[80, 80:240].all()
    assert white[81, 100]
    assert not white[79].any()
    assert (drawn[79, 100] == 0).all()
    assert (drawn[83, 100] == 0).all()
    assert (drawn[120, 160] == (255, 0, 0)).all()
    whole = np.array(outlined(Image.new("RGB", (320, 320), "red"), [torch.ones(4, 4)]))
    assert (whole[0] == 255).all()


QUICK = ("ixg", "genatt", "gradcam", "occlusion", "random")
CONTRACT = [(DPT, name) for name in contract_names()]
CONTRACT += [
    (kind, name) for kind in ("SegformerForSemanticSegmentation", EOMT, SAM, "yolos") for name in contract_names()
]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if name in QUICK and kind == DPT else pytest.mark.slow)
        for kind, name in CONTRACT
    ],
)
def test_methods_keep_their_contract(kind: str, name: str) -> None:
    vit = detectors.opened(kind) if kind == "yolos" else opened(kind)
    images = detectors.images(kind, 2) if kind == "yolos" else inputs(vit, 2)
    if vit.task == "detection":
        head: Any = pl.heads.Box(box=(10, 10, 60, 50), label="dog", missed=True)
    elif vit.task == "masks":
        head = pl.heads.Mask(points=(20, 30))
    else:
        counts = vit.scores_of(vit.plain(images)).argmax(1).flatten().bincount(minlength=2)
        head = pl.heads.Region(box=(0, 16, 32, 64), label=int(counts.argmin()), missed=True)
    check_method(name, vit.ask(head), images)


def test_models_that_are_refused() -> None:
    torch.manual_seed(0)
    convolutions = transformers.ConvNextConfig(depths=[1] * 4, hidden_sizes=[8, 8, 16, 16], out_features=STAGES)
    config = transformers.UperNetConfig(backbone_config=convolutions, hidden_size=32, use_auxiliary_head=False)
    with pytest.raises(PatchlightError, match="is a convolutional network"):
        pl.wrap(transformers.UperNetForSemanticSegmentation(config), preprocess=pl.Preprocess((64, 64)))
    with pytest.raises(PatchlightError, match=r"question for models for masks, and .* is a model for segmentation"):
        pl.explain(opened(DPT), inputs(opened(DPT)), "ixg", head=pl.heads.Mask())


@pytest.mark.parametrize("kind", [DPT, SAM])
def test_a_saved_folder_opens(kind: str, tmp_path: Path) -> None:
    _drawn(kind).save_pretrained(tmp_path)  # type: ignore[operator]
    vit = pl.load(f"hf:{tmp_path}", preprocess=pl.Preprocess((64, 64)))
    images = inputs(vit)
    with vit.steady(), torch.no_grad():
        torch.testing.assert_close(vit.model_output(images), opened(kind).model_output(images))


def test_sam2_is_published_as_a_model_for_videos(tmp_path: Path) -> None:
    _drawn("Sam2Model").save_pretrained(tmp_path)  # type: ignore[operator]
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Sam2VideoModel"], "model_type": "sam2_video"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    vit = pl.load(f"hf:{tmp_path}", preprocess=pl.Preprocess((64, 64)))
    assert (type(vit.model).__name__, vit.reads) == ("Sam2Model", MODELS["Sam2Model"][1])


def test_the_bundled_segmenter() -> None:
    """It finds the square of a scene; the map lies more on it than a map of the same value everywhere would."""
    vit: Any = pl.load("pocket-segmenter")
    assert vit.reads == (4, 5, 6)
    head = pl.heads.Region(point=(50, 44), predicted=True)
    att = pl.explain(vit, shapes.SCENES / "scene-2.png", "genatt", head=head)
    assert att.labels == ("square",)
    region = torch.zeros(96, 96)
    region[29:58, 35:64] = 1
    assert float(att.inside(region)) > 3 * float(region.mean())
    file = shapes.ZOO / "pocket-segmenter.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == shapes.description("pocket-segmenter")["sha256"]

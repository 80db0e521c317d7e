"""Every name that `patchlight models` lists, at a small size: what is read from it is the model, or it is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import timm
import torch

import patchlight as pl
from patchlight.anatomy.load import list_models
from patchlight.anatomy.names import PLAIN, module_of
from patchlight.anatomy.opened import Anatomy
from patchlight.methods.requests import refusal, resolve
from tests.completeness import totals
from tests.dropping import assert_dropping_is_masking
from tests.families import CLASSES, images, randomise
from tools.models import options
from tools.models import small as narrow

STAGED = ("swin", "pvt", "twins")
SIZED = ("gemma4", "naflex")
"""Their size is that of the configuration: up to 2,304 tokens, which take 18 GB."""
READ = (*PLAIN, "swin_transformer", "swin_transformer_v2", "pvt_v2", "twins")
NAMES = [name for name in list_models() if not name.startswith("pocket") and module_of(name) in READ]
"""Those with an anatomy of their own; the others are cut where timm says (tests/tools/test_models.py)."""


def small(name: str) -> Any:
    """The model with two blocks (or one block a stage), as narrow as its kind allows."""
    torch.manual_seed(0)
    if name.startswith(STAGED):
        overlay = {"pretrained_cfg_overlay": {"input_size": (3, 64, 64)}}
        given: dict[str, Any] = {"depths": (1, 1, 1, 1)} | overlay
        if name.startswith("swin"):
            given |= {"img_size": 64, "window_size": 4, "embed_dim": 16, "num_heads": (1, 2, 2, 4)}
        return timm.create_model(name, num_classes=CLASSES, **given)
    if name.startswith(SIZED):
        overlay = {"pretrained_cfg_overlay": {"input_size": (3, 64, 64)}}
        return timm.create_model(name, num_classes=CLASSES, **{**options(name), **overlay})
    return narrow(name)


def opened(name: str) -> Anatomy:
    model = randomise(small(name))
    single = "rope_mixed" in name or "deepseek" in name  # timm's own runs in float32 alone
    return pl.wrap(model if single else model.double(), name=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_listed_name_is_read_as_it_is(name: str) -> None:
    vit = opened(name)
    batch = images(vit, 2)
    with torch.no_grad():
        logits = vit.model(batch)
    assert (logits[0] - logits[1]).abs().max() > 1e-4, "the test model does not look at its input"
    _agree(vit.logits(batch), logits)
    if vit.depth == 0:
        return
    if vit.can_drop is None and vit.attention is None:
        assert_dropping_is_masking(vit, batch, tolerance=_limit(vit.dtype))
    if vit.can_rule is None:
        _agree(*totals(vit, batch))
    for method in ("genatt", "gradcam", "tokentm", "alti", "bt-t", "transatt", "decompx", "vit-cx", "kernel-shap"):
        _works_or_is_refused(vit, batch, method)


def _works_or_is_refused(vit: Anatomy, batch: torch.Tensor, method: str) -> None:
    entry = resolve(method)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores = pl.explain(vit, batch, method, target=1, **entry.method.quick).scores
    except pl.Unsupported:
        assert refusal(resolve(method, entry.method.quick), vit) is not None, "refused only when it was under way"
    else:
        assert bool(scores.isfinite().all())


def _agree(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=_limit(a.dtype), rtol=_limit(a.dtype))


def _limit(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-4

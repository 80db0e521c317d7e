"""Attention, TokenTM and transition methods against the authors' own outputs on deit_tiny."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from patchlight.core.errors import DegenerateMap
from patchlight.core.targets import Targets
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from tests.close import close
from tests.reference import deit_tiny, inputs, reference

WITHIN = 1e-3
MODES = {"plain": "", "libra": ".libra", "alilrp": ".conservative", "attnlrp": ".attnlrp"}

ONE_PASS: dict[str, tuple[str, dict[str, Any]]] = {
    "genatt": ("genatt", {}),
    "genatt_bt_copy_start1": ("genatt", {"preset": "bt"}),
    "raw_attention": ("rawatt", {}),
    "rollout_chefer_start0": ("rollout", {}),
    "rollout_chefer_start1": ("rollout", {"preset": "chefer"}),
    "rollout_vitexplain_mean_0.9": ("rollout", {"preset": "vit-explain"}),
    "attn_gradcam": ("attcam", {}),
    "attcat_authors_input_pairing": ("attcat", {"pair": "input"}),
    "tokentm_literal_card_ov": ("tokentm", {"preset": "third-party"}),
    "lg_meanattn_last": ("rawatt", {}),
    "lg_meanattn_plus": ("rawatt.plus", {}),
    "lg_rollout_half_nonorm": ("rawatt.rollout", {"normalise": "none"}),
}
BY_MODE: dict[str, tuple[str, dict[str, Any]]] = {
    "attcat": ("attcat", {}),
    "attcat_skipplus": ("attixg.skipplus", {}),
    "attcam_last": ("attcam", {"preset": "skipplus"}),
    "attcam_plus": ("attcam.plus", {}),
    "genatt_plus": ("genatt.plus", {}),
    "genatt_skipplus": ("genatt.skipplus", {}),
    "genatt_halfrollout": ("genatt.rollout", {"normalise": "none"}),
    "tokentm": ("tokentm", {"preset": "libragrad"}),
    "cat_plus": ("cat", {}),
}
ONE_PASS |= {
    f"lg_{mode}_{name}": (asked + rule, settings)
    for mode, rule in MODES.items()
    for name, (asked, settings) in BY_MODE.items()
}
STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tam_start0": ("tam", {"preset": "tis"}),
    "tam_start4": ("tam", {}),
    "bt_h_start1": ("bt-h", {"preset": "tis"}),
    "bt_h_start4": ("bt-h", {}),
    "bt_t_start1": ("bt-t", {"preset": "tis"}),
    "bt_t_start6": ("bt-t", {"start": 5}),
    "bt_t_start7": ("bt-t", {}),
}


def _targets(name: str, count: int) -> Targets:
    return Targets(torch.from_numpy(reference(name)["target"][:count])[:, None])


@cache
def _together() -> dict[str, torch.Tensor]:
    """All one-pass maps of the four images, from one call."""
    requests = [resolve(asked, settings) for asked, settings in ONE_PASS.values()]
    with pytest.warns(DegenerateMap, match="image 1 is constant: all heads have negative mean gradients"):
        _, maps = compute(deit_tiny(), inputs(), requests, _targets("genatt", 4), 0)
    return {name: scores[:, 0] for name, scores in zip(ONE_PASS, maps, strict=True)}


@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_methods(name: str) -> None:
    theirs = reference(name)
    if theirs["target_type"] != "class-agnostic":
        assert torch.equal(_targets(name, 4).index, _targets("genatt", 4).index)
    for ours, one in zip(_together()[name], theirs["maps"], strict=True):
        if not one.any():
            assert not ours.any()
        else:
            close(ours, one, WITHIN)


def test_attcam_before_its_relu() -> None:
    """The clamped map of image 1 is all zero; the signed one says why."""
    signed = _together()["lg_plain_attcam_last"]
    close(signed, reference("attn_gradcam")["signed_no_relu"], WITHIN)
    assert not _together()["attn_gradcam"][1].any()
    assert signed[1].max() <= 0


@pytest.mark.parametrize("name", STARTS)
def test_transition_methods(name: str) -> None:
    asked, settings = STARTS[name]
    _, (maps,) = compute(deit_tiny(), inputs(2), [resolve(asked, settings)], _targets(name, 2), 0)
    for ours, one in zip(maps[:, 0], reference(name)["maps"], strict=False):
        close(ours, one, WITHIN)

"""`explain`: one pass for many methods, every kind of input, and clear sentences for wrong ones."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Setting
from patchlight.evidence.rules import RULES
from patchlight.methods.base import COMPOSITIONS, METHODS, LayerMap
from patchlight.methods.compositions import PLUS
from patchlight.methods.maps import _constant, _warn_if_degenerate, compute
from patchlight.methods.requests import refusal, resolve
from tests.families import asked, build, images, shared


class Counter:
    """Counts forwards (calls of the first block) and backwards of a model."""

    def __init__(self, vit: Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards = self.backwards = 0
        block, grad = vit.block, torch.autograd.grad

        def counted_block(index: int, *args: object) -> torch.Tensor:
            self.forwards += index == 0
            return block(index, *args)  # type: ignore[arg-type]

        def counted_grad(*args: object, **kwargs: object) -> object:
            self.backwards += 1
            return grad(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(vit, "block", counted_block)
        monkeypatch.setattr(torch.autograd, "grad", counted_grad)


def one_pass_names() -> list[str]:
    more, entries = ("diffmask", "legrad"), METHODS.items()
    return [n for n, m in entries if isinstance(m, LayerMap) and m.rule == "plain" and n not in more]


def test_many_methods_take_one_forward_and_one_backward_per_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    counter = Counter(vit, monkeypatch)
    names = one_pass_names()
    maps = pl.explain(vit, images(vit), names)
    assert list(maps) == names
    assert len(names) >= 25
    assert (counter.forwards, counter.backwards) == (1, 1)
    pl.explain(vit, images(vit), [*names, "genatt.libra", "ixg.libra", "ixg.attnlrp"])
    assert (counter.forwards, counter.backwards) == (4, 4)


def test_methods_without_gradients_take_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    counter = Counter(vit, monkeypatch)
    pl.explain(vit, images(vit), ["rawatt", "rollout"])
    assert (counter.forwards, counter.backwards) == (1, 0)
    pl.explain(vit, images(vit), "genatt", target=[[0, 1, 2]] * 3)
    assert (counter.forwards, counter.backwards) == (2, 3)


def test_blocks_below_the_start_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    modes: list[bool] = []
    block = vit.block
    monkeypatch.setattr(vit, "block", lambda i, *a: (modes.append(torch.is_grad_enabled()), block(i, *a))[1])
    pl.explain(vit, images(vit), "ixg.skipplus.libra")
    assert modes == [False, False, True]


def test_tensors_pictures_and_paths_agree(tmp_path: Path) -> None:
    vit = shared("vit")
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (90, 70, 3), np.uint8)) for _ in range(3)]
    paths = []
    for i, picture in enumerate(pictures):
        paths.append(tmp_path / f"{i}.png")
        picture.save(paths[-1])
    tensor = torch.stack([vit.preprocess.tensor(p) for p in pictures])
    expected = pl.explain(vit, tensor).scores
    measured = pl.evaluate(vit, tensor, "genatt", "sparseness").values
    arrays = [np.asarray(picture) for picture in pictures]
    floats = np.stack(arrays) / np.float32(255)
    for given in (
        pictures,
        paths,
        [str(p) for p in paths],
        list(tensor),
        arrays,
        np.stack(arrays),
        floats,
    ):
        assert torch.equal(pl.explain(vit, given).scores, expected)
        assert torch.equal(pl.evaluate(vit, given, "genatt", "sparseness").values, measured)
    att = pl.explain(vit, arrays[0])
    assert att.overlay().size == pl.explain(vit, str(paths[0])).overlay().size
    assert np.array_equal(np.asarray(att.overlay(arrays[0])), np.asarray(att.overlay(pictures[0])))
    compared = pl.compare(vit, np.stack(arrays), ["genatt", "random"], "sparseness")
    assert torch.equal(compared.evaluations["genatt"]["sparseness"].values, measured)
    assert torch.allclose(pl.explain(vit, pictures[0]).scores, expected[:1], atol=1e-6)
    assert torch.allclose(pl.explain(vit, str(paths[0])).scores, expected[:1], atol=1e-6)
    assert torch.allclose(pl.explain(vit, tensor[0]).scores, expected[:1], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(1, 3, 32, 32), r"shape \[1, 3, 32, 32\]; this model takes \[B,3,64,64\]"),
        (torch.zeros(0, 3, 64, 64), "are empty"),
        (torch.zeros(1, 3, 64, 64, dtype=torch.uint8), "dtype torch.uint8; give a preprocessed"),
        (torch.full((1, 3, 64, 64), float("nan")), "NaN or infinity"),
        (
            np.zeros((64, 64, 5)),
            r"an image array has shape \[64, 64, 5\]; give \[H,W,C\] or \[H,W\], C being 1, 3 or 4",
        ),
        (np.zeros((1, 3, 64, 64)), r"shape \[3, 64, 64\]; give \[H,W,C\]"),
        (
            np.zeros((64, 64, 3), np.int64),
            "values of type int64; give uint8 values from 0 to 255, or floats from 0 to 1",
        ),
        (np.full((64, 64, 3), 255.0), "values from 255 to 255; give uint8"),
        (np.full((64, 64, 3), np.nan), "values from nan to nan; give uint8"),
        ([], "no images"),
        ([3], "given as int"),
        ("nowhere.jpg", "no image at 'nowhere.jpg'"),
    ],
)
def test_wrong_images_are_explained(given: object, message: str) -> None:
    with pytest.raises(pl.PatchlightError, match=message):
        pl.explain(shared("vit"), given)


def test_aliases_of_rules_and_compositions_stand_behind_a_name_too() -> None:
    pl.register_rule(pl.Rule("a-rule", paper="a test", norm="frozen", aliases=("its-alias",)))
    pl.register_composition("all-blocks", span=PLUS.span, aliases=("every-block",))(PLUS.function)
    try:
        request = resolve("ixg.every-block.its-alias")
        assert request.name == "ixg.all-blocks.a-rule"
        assert request.rule.norm == "frozen"
        with pytest.raises(pl.PatchlightError, match="two backward rules"):
            resolve("ixg.a-rule.its-alias")
    finally:
        RULES.remove("a-rule")
        COMPOSITIONS.remove("all-blocks")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("genat", {}, "no method is called 'genat'; did you mean 'genatt'"),
        ("chefr2", {}, "did you mean 'chefer2'"),
        ("genatt.libre", {}, "no composition or rule is called 'libre'.*did you mean 'libra'"),
        ("genatt.libra.attnlrp", {}, "two backward rules"),
        ("ixg.plus.skipplus", {}, "two compositions"),
        ("ixg.rollout", {}, "multiplies token-to-token matrices"),
        ("random.plus", {}, "has no layer maps"),
        ("skipplus", {}, "'skipplus' is not a method; it follows one, as in 'ixg.skipplus'"),
        ("libra", {}, "'libra' is not a method; it follows one, as in 'ixg.libra'"),
        ("rollout.plus", {}, "already is a product over all blocks"),
        ("rawatt.libra", {}, "uses no gradient"),
        ("rise.libra", {}, "uses no gradient"),
        ("rollout", {"stat": 1}, "no setting 'stat'; did you mean 'start'"),
        ("rise", {"mode": "tokens"}, "no setting 'mode'; its settings: samples, grid, keep, normaliser, unit, fill"),
        ("rollout", {"fusion": "sum"}, "fusion='sum' of 'rollout' is not valid"),
        ("rollout", {"discard": 1.5}, "discard=1.5 of 'rollout' is not valid"),
        ("rollout", {"start": 3}, "block 3 does not exist; this model has blocks 0 to 2"),
        ("rollout", {"preset": "cheffer"}, "no preset 'cheffer'; did you mean 'chefer'"),
        ("gradcam", {"layer": "blocks[-1].nrom"}, "is not a place"),
        ([], {}, "no method was named"),
        ("genatt", {"batch_size": -1}, "batch_size -1"),
        ("genatt", {"batch_size": 0}, "batch_size 0"),
        ("genatt", {"seed": "x"}, "seed 'x' is a str"),
        ("ixg.plus", {"level": "pixel"}, "sums over blocks, but level='pixel' has no blocks"),
        ("ixg", {"level": "pixel", "start": 1}, "start=1 does not apply"),
    ],
)
def test_wrong_requests_are_explained(method: str, settings: dict[str, object], message: str) -> None:
    vit = shared("vit")
    with pytest.raises(pl.PatchlightError, match=message):
        pl.explain(vit, images(vit), method, **settings)  # type: ignore[arg-type]


def test_settings_by_method_and_aliases() -> None:
    vit = shared("vit")
    batch = images(vit)
    maps = pl.explain(vit, batch, {"rollout": {"start": 1}, "genatt": {}})
    torch.testing.assert_close(maps["rollout"].scores, pl.explain(vit, batch, "rollout", start=1).scores)
    assert maps["rollout"].settings["start"] == 1
    for alias in ("chefer2", "cgw2", "gae"):
        found = pl.explain(vit, batch, [alias])[alias]
        assert found.method == "genatt"
        assert torch.equal(found.scores, maps["genatt"].scores)


@pytest.mark.parametrize(
    ("family", "chosen"), [("vit", "fullgrad-plus.libra"), ("cait", "fullgrad-plus"), ("pit", "gradcam")]
)
def test_auto_is_the_first_method_that_works_on_the_model(family: str, chosen: str) -> None:
    vit = shared(family)
    att, named = pl.explain(vit, images(vit)), pl.explain(vit, images(vit), chosen)
    assert att.method == chosen
    assert torch.equal(att.scores, named.scores)
    assert pl.explain(vit, images(vit), ["auto", "random"])["auto"].method == chosen


def test_auto_chooses_among_methods_that_take_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    assert pl.explain(vit, images(vit), level="pixel").method == "grad"
    with pytest.raises(pl.PatchlightError, match=r"'fullgrad-plus.libra' has no setting 'stat'; did you mean 'start'"):
        resolve("auto", {"stat": 1})
    with pytest.raises(pl.PatchlightError, match=r"none of them has the setting 'samples'; .*'posterior'"):
        resolve("auto", {"samples": 8})
    with pytest.raises(pl.PatchlightError, match="use 'auto' alone"):
        resolve("auto.libra")
    monkeypatch.setattr(vit, "gradient", "it is a test")
    assert resolve("auto").suited(vit).name == "posterior"
    assert refusal(resolve("auto"), vit) is None


def test_best_is_posterior() -> None:
    assert resolve("best").name == "posterior"


def test_against_is_the_second_of_a_pair() -> None:
    vit = shared("vit")
    batch = images(vit)
    for target, against, pairs in (
        (1, 2, (1, 2)),
        ([0, 1, 2], 3, [(0, 3), (1, 3), (2, 3)]),
        (torch.tensor([0, 1, 2]), [3, 4, 5], [(0, 3), (1, 4), (2, 5)]),
        (0, np.array([3, 4, 5]), [(0, 3), (0, 4), (0, 5)]),
    ):
        att, pair = pl.explain(vit, batch, target=target, against=against), pl.explain(vit, batch, target=pairs)
        assert torch.equal(att.scores, pair.scores)
        assert att.against is not None
        assert pair.against is not None
        assert torch.equal(att.against, pair.against)
    for target, words in ((None, "no target was given"), ((0, 1), "is already a pair"), ([0], "has length 1")):
        with pytest.raises(pl.PatchlightError, match=words):
            pl.explain(vit, batch, target=target, against=[2, 2, 2])


@pytest.mark.parametrize("method", ["rollout", "attnfrom", "alti", "rawatt.plus", "globenc", "eigencam"])
def test_methods_that_ignore_the_class_are_marked_and_refuse_a_contrast(method: str, tmp_path: Path) -> None:
    vit = shared("vit")
    att = pl.explain(vit, images(vit), method, target=1)
    assert att.ignores_class
    assert pl.Attribution.load(att.save(tmp_path / "att")).ignores_class
    sentence = (
        "ignores the class, so it cannot show one class against another; these methods can: 'fullgrad-plus.libra'"
    )
    for call in (pl.explain, pl.evaluate):
        with pytest.raises(pl.Unsupported, match=f"'{method}' {sentence}"):
            call(vit, images(vit), method, target=(1, 2))


def test_other_methods_and_the_random_baseline_take_a_contrast() -> None:
    vit = shared("vit")
    maps = pl.explain(vit, images(vit), ["auto", "rawatt.plus", "random"], target=1)
    assert [att.ignores_class for att in maps.values()] == [False, True, True]
    maps = pl.explain(vit, images(vit), ["auto", "posterior", "random"], target=1, against=2)
    assert [att.ignores_class for att in maps.values()] == [False, False, True]
    posterior = pl.explain(vit, images(vit), "posterior", target=(1, 2), prior="rollout", samples=8)
    assert posterior.scores.isfinite().all()


def test_attention_does_not_ignore_a_class_that_reads_its_own_tokens() -> None:
    vit = asked("max-neurons")
    assert not pl.explain(vit, images(vit), "rollout", target=(0, 1)).ignores_class
    assert pl.explain(vit, images(vit), "eigencam", target=0).ignores_class


def test_rule_wrappers_may_stand_anywhere_and_are_written_last() -> None:
    vit = shared("vit")
    a, b = (pl.explain(vit, images(vit), name) for name in ("ixg.libra.plus", "ixg.plus.libra"))
    assert a.method == b.method == "ixg.plus.libra"
    assert torch.equal(a.scores, b.scores)


def test_a_degenerate_map_warns_and_says_what_to_use() -> None:
    vit = shared("vit")
    with pytest.warns(pl.DegenerateMap, match=r"use '\.libra'"):
        pl.explain(vit, images(vit), "ixg", start=2)


def test_a_constant_map_is_recognised_within_rounding() -> None:
    vit, request = shared("vit"), resolve("random")
    ripple = torch.linspace(0, 1, 16).view(1, 1, 1, 4, 4)
    with pytest.warns(pl.DegenerateMap, match="the map of image 0 is constant"):
        _warn_if_degenerate(request, vit, _constant(0.3 + 1e-6 * ripple)[0], 0)
    _warn_if_degenerate(request, vit, _constant(0.3 + 1e-5 * ripple)[0], 0)


def test_progress_is_reported() -> None:
    vit = shared("vit")
    seen: list[tuple[int, int]] = []
    pl.explain(vit, images(vit), batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]


def test_memory_does_not_grow() -> None:
    vit = shared("vit")
    batch = images(vit)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    pl.explain(vit, batch, ["genatt", "ixg.libra"])
    before = live()
    for _ in range(50):
        pl.explain(vit, batch, ["genatt", "ixg.libra"])
    assert live() <= before


def test_a_layer_map_ignores_the_class_where_it_reads_no_gradient() -> None:
    for name, entry in METHODS.items():
        if isinstance(entry, LayerMap):
            assert resolve(name).backward != entry.ignores_class == resolve(name).ignores_class, name


def choices(setting: Setting) -> list[Any]:
    """The values a setting of few words can have."""
    kinds = get_args(setting.kind) if get_origin(setting.kind) in (Union, UnionType) else (setting.kind,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return [*words, *((True, False) if bool in kinds else ())]


LAYER_MAPS = [name for name, method in METHODS.items() if isinstance(method, LayerMap) and name != "diffmask"]


@pytest.mark.parametrize("name", LAYER_MAPS)
def test_layer_maps_declare_what_they_read_whatever_the_settings(name: str) -> None:
    vit = shared("vit")
    method = METHODS[name]
    varied: list[dict[str, Any]] = [{}, *({"preset": preset} for preset in method.presets)]
    varied += [{key: value} for key, one in method.settings(method.composition).items() for value in choices(one)]
    for request in (resolve(name, settings) for settings in varied):
        if refusal(request, vit) is not None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compute(vit, images(vit, 1), [request], None, 0)

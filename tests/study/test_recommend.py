"""`recommend` on tiny models: the whole way, bad input, a kill and what follows, and time that is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

import patchlight as pl
from patchlight.anatomy import heads
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.methods.requests import resolve
from patchlight.metrics.base import lacking
from patchlight.study import sources
from patchlight.study.cost import forward_seconds
from patchlight.study.recommend import work
from patchlight.study.recommend.decide import decide
from patchlight.study.recommend.gallery import Gallery
from patchlight.study.recommend.panel import choose_methods, fit_samples, method_spec
from patchlight.study.recommend.run import seconds_of
from patchlight.study.recommend.work import RaceWorker
from patchlight.study.sources import BatchMaps
from patchlight.zoo import pocket
from tests.families import randomise
from tests.study.test_verdict import resumed

SRG = {"srg": {"steps": 4}}
METHODS = ["genatt", "rollout", "ixg"]


def tiny(seed: int = 0, lively: bool = True, **options: Any) -> Anatomy:
    torch.manual_seed(seed)
    sizes = {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 7, **options}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    return pl.wrap(randomise(model, seed) if lively else model)


def images(number: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(number, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


def asked(**options: Any) -> pl.Verdict:
    given = {"budget": "2m", "methods": METHODS, "metrics": SRG, "progress": False, **options}
    vit = given.pop("vit") if "vit" in given else tiny()
    return pl.recommend(vit, given.pop("images") if "images" in given else images(), **given)


def changed_maps(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, BatchMaps], BatchMaps]) -> None:
    """Have maps changed by a function of the method's name, which may raise."""
    real = sources.compute_maps

    def computed(vit: Anatomy, batch: Tensor, requests: Any, *rest: Any) -> list[BatchMaps]:
        return [change(requests[0].name, maps) for maps in real(vit, batch, requests, *rest)]

    monkeypatch.setattr(work, "compute_maps", computed)


def ticking(monkeypatch: pytest.MonkeyPatch, step: float = 0.05) -> None:
    """A clock that ticks at every look."""
    ticks = count(step=step)
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), (2.5, 2.5), ("45", 45), ("1 h 30 min ", 5400), ("1.5m30", 120)],
)
def test_budgets(words: str | float, seconds: float) -> None:
    assert seconds_of(words) == seconds


@pytest.mark.parametrize(
    "words", ["", "soon", "10 minutes", "9" * 5000 + "x", "1h" * 2000 + "!", "10 20", -1, 0, float("nan"), None, True]
)
def test_what_is_no_time(words: Any) -> None:
    with pytest.raises(PatchlightError, match="is not a valid duration; give seconds"):
        seconds_of(words)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pl.Verdict, Path]:
    """All default metrics, every image, and nothing left to do before time is over."""
    folder = tmp_path_factory.mktemp("verdict")
    return asked(metrics=None, out=folder), folder


def test_every_image_is_seen_and_the_scores_are_those_of_evaluate(run: tuple[pl.Verdict, Path]) -> None:
    verdict, folder = run
    assert verdict.row("random").images == verdict.row("genatt").images == 8
    settings = dict(verdict.about["metrics"]["srg zero"])
    vit, order = tiny(), torch.randperm(8, generator=torch.Generator().manual_seed(0))
    peer = pl.evaluate(vit, images()[order], "genatt", settings.pop("metric"), **settings)
    own = resumed(folder).values("srg zero")["genatt"]
    assert [own[i] for i in range(8)] == pytest.approx(peer.values.tolist(), abs=1e-5)
    leading = verdict.row(str(verdict.leading))
    assert {"srg zero", "srg blur", "randomisation", "max-sensitivity", "token-deletion", "saco"} <= set(leading.others)
    zero, blur = leading.others["srg zero"], leading.others["srg blur"]
    assert leading.score == pytest.approx((zero + blur) / 2, abs=1e-9)
    assert zero == pytest.approx(leading.others["insertion zero"] - leading.others["deletion zero"], abs=1e-6)


def test_files_say_the_same(run: tuple[pl.Verdict, Path]) -> None:
    verdict, folder = run
    assert (folder / "verdict.txt").read_text() == f"{verdict}\n"
    assert json.loads((folder / "verdict.json").read_text())["leading"] == verdict.leading
    assert (folder / "verdict.html").read_text().count("<img") >= 6
    assert decide(resumed(folder)).to_json() == verdict.to_json()


def test_after_a_kill_the_rest_is_done_and_the_verdict_is_of_the_same_values(
    run: tuple[pl.Verdict, Path], tmp_path: Path
) -> None:
    verdict, folder = run
    lines = (folder / "cells.jsonl").read_bytes()
    (tmp_path / "cells.jsonl").write_bytes(lines[: len(lines) // 3])
    before = resumed(tmp_path)
    again = asked(metrics=None, out=tmp_path, resume=True)
    assert {row.method: row.score for row in again.rows} == pytest.approx(
        {row.method: row.score for row in verdict.rows}, abs=1e-5
    )
    after = resumed(tmp_path)
    kept = list(after.cells())
    assert all(cell in kept for cell in before.cells())
    assert decide(after).to_json() == again.to_json()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1}, "another 'seed': 0 there, 1 now"),
        ({"vit": tiny(1)}, "another 'weights'"),
        ({"metrics": {"srg": {"steps": 2}}}, "another 'metrics'"),
        ({"images": images(7)}, "another 'images': 8 there, 7 now"),
        ({"images": images(8, 1)}, "is not the image that was measured"),
        ({"methods": ["gradcam"]}, "other methods"),
        ({"resume": False}, "already contains measurements"),
    ],
)
def test_cells_about_something_else_are_not_used(
    run: tuple[pl.Verdict, Path], changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(PatchlightError, match=words):
        asked(**{"metrics": None, "out": run[1], "resume": True, **changed})


@pytest.mark.parametrize(("lost", "words"), [(["random"], "random was"), (METHODS, "every other method was")])
def test_nothing_left_to_compare_with_random(
    lost: list[str], words: str, run: tuple[pl.Verdict, Path], tmp_path: Path
) -> None:
    (tmp_path / "cells.jsonl").write_bytes((run[1] / "cells.jsonl").read_bytes())
    for label in lost:
        resumed(tmp_path).leave_out(label, "it failed: no such thing")
    with pytest.raises(PatchlightError, match=f"{words} left out in an earlier.*{lost[0]}: it failed: no such"):
        asked(metrics=None, out=tmp_path, resume=True)


def failing(*names: str, after: int = 0) -> Callable[[str, BatchMaps], BatchMaps]:
    """Methods that raise an error after so many calls."""
    calls: list[str] = []

    def broken(name: str, maps: BatchMaps) -> BatchMaps:
        calls.append(name)
        if name in names and calls.count(name) > after:
            raise RuntimeError("no such thing")
        return maps

    return broken


def test_where_random_fails_the_race_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not wait for it until time is over."""
    changed_maps(monkeypatch, failing("random", after=1))
    verdict = asked(budget="30s", images=images(16))
    assert verdict.left_out == {"random": "it failed: no such thing"}
    assert verdict.best is None
    assert verdict.seconds < 25


def test_a_method_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_maps(monkeypatch, failing("rollout"))
    verdict = asked()
    assert verdict.left_out == {"rollout": "it failed: no such thing"}
    assert verdict.row("genatt").images == 8
    changed_maps(monkeypatch, failing("random", *METHODS))
    with pytest.raises(PatchlightError, match=r"no method could be scored on .*genatt: it failed: no such thing"):
        asked()


def test_a_map_that_cannot_be_scored_counts_as_random(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_maps(monkeypatch, lambda name, own: BatchMaps(own.maps * torch.nan) if name == "rollout" else own)
    verdict = asked()
    assert verdict.row("rollout").undefined == verdict.row("rollout").images == 8
    assert verdict.row("rollout").score == verdict.row("random").score
    assert "No usable map, scored as random: rollout (8 images)" in str(verdict)


def test_only_so_many_maps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = RaceWorker._measure

    def measure(self: RaceWorker, *rest: Any) -> None:
        real(self, *rest)
        seen.append(len(self._maps))

    monkeypatch.setattr(RaceWorker, "_measure", measure)
    free = asked(images=images(24), worth=10)
    assert max(seen) > 10
    seen.clear()
    monkeypatch.setattr(work, "MAPS", 10 * 16)
    bound = asked(images=images(24), worth=10)
    assert max(seen) <= 10
    assert {r.method: r.score for r in bound.rows} == pytest.approx({r.method: r.score for r in free.rows}, abs=1e-5)


@pytest.mark.parametrize(("seed", "classes"), [(0, 2), (1, 7), (2, 2)])
def test_nothing_beats_random_on_random_weights(seed: int, classes: int) -> None:
    """As timm draws them: the prediction hardly depends on the image, and the verdict says so."""
    vit = tiny(seed, lively=False, num_classes=classes)
    verdict = asked(vit=vit, images=images(10, seed), methods=["occlusion", "genatt", "rollout"])
    assert verdict.best is None
    assert "hardly depends on the image" in str(verdict)


def test_unreadable_images_are_left_out_and_reported(tmp_path: Path) -> None:
    for i, one in enumerate(images(7)):
        Image.fromarray((one.permute(1, 2, 0).clamp(0, 1) * 255).byte().numpy()).save(tmp_path / f"{i}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    verdict = asked(images=tmp_path)
    assert verdict.images == 7
    assert [Path(name).name for name in verdict.failed] == ["broken.png"]
    assert "1 image could not be read" in str(verdict)
    with pytest.raises(PatchlightError, match="none of the 1 image can be read"):
        asked(images=[tmp_path / "broken.png"])


def test_no_more_images_are_read_than_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that leaves no time for the most of them; in 600 images there are looks beyond what is held."""
    for i in range(600):
        Image.new("RGB", (4, 4), (i % 256, i // 256, 99)).save(tmp_path / f"{i}.png")
    (tmp_path / "300.png").write_bytes(b"no image")
    read: list[int] = []
    real = Gallery.source

    def source(self: Gallery, place: int) -> Any:
        read.append(place)
        return real(self, place)

    monkeypatch.setattr(Gallery, "source", source)
    gallery = Gallery(tiny(), tmp_path, 0)
    assert gallery.first_without_reading(600) == list(range(600))
    assert not read
    sound = gallery.first(600)
    assert len(sound) == 599 == len(gallery)
    assert gallery.first(600) == gallery.first_without_reading(600) == sound
    assert read == list(range(600))
    assert [Path(name).name for name in gallery.failed] == ["300.png"]
    read.clear()
    ticking(monkeypatch)
    verdict = asked(images=tmp_path, budget=60.0, metrics={"srg": {"steps": 2}})
    assert 6 <= verdict.images < 200
    assert len(read) <= 2 * verdict.images + 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 1e-6}, r"too small for one image of random and .*; give at least"),
        ({"methods": ["diffmask"]}, r"no method can be compared with random on .*: diffmask: it needs gates"),
        ({"methods": ["genat"]}, "did you mean 'genatt'"),
        ({"methods": {"genatt": {"score": len}}}, "has a function as score, which a verdict cannot record"),
        ({"metrics": "miou"}, "needs masks"),
        ({"worth": -1}, "is not a valid difference"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        asked(**options)


def test_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race ends in time, with methods set aside or left out, and told."""
    ticking(monkeypatch)
    verdict = asked(budget=60.0, methods=["genatt", "rollout", "ixg", "gradcam", "occlusion"], images=images(24))
    assert verdict.seconds <= 66
    assert verdict.images >= 6
    assert verdict.row("random").images == verdict.images


def test_a_small_budget_has_no_best_and_says_what_a_comparison_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two methods fit; the plan is printed before, and the verdict names the budget that is needed."""
    ticking(monkeypatch)
    verdict = asked(budget=6.0, methods=None, images=images(8), progress=True)
    plan = capsys.readouterr().err
    assert "Plan: " in plan
    assert "on up to 8 images, within 6 s" in plan
    assert verdict.best is None
    assert len(verdict.compared) < 3
    assert "No method is recommended" in str(verdict)
    assert "A comparison of 3 methods needs a budget of about" in str(verdict)
    assert verdict.comparison_seconds > 6


def test_costs_are_seconds_per_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the latest ones; a race of four images at once predicts as one of single images."""
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: 10.0))
    worker = RaceWorker(SimpleNamespace(vit=None), None, SimpleNamespace(about={"seed": 0}), None, 1.0)  # type: ignore[arg-type]
    assert [worker._record_seconds("ixg", "srg", start, 4) for start in (2.0, 6.0, 9.0)] == [2.0, 1.0, 0.25]
    assert worker.cost("ixg", "srg") == 1.0


def test_cheap_methods_race_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that three are compared on the same images, although the first ones named are expensive."""
    ticking(monkeypatch)
    dear = ["occlusion", "rise", "vit-cx", "score-cam"]
    verdict = asked(budget=14.0, methods=[*dear, "genatt", "rollout", "ixg"], images=images(8))
    assert {"genatt", "rollout", "ixg"} <= set(verdict.compared)


def test_all_methods_that_work_take_part_as_far_as_time_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, 0.02)
    verdict = asked(budget=20.0, methods=None, images=images(6))
    assert verdict.seconds <= 22
    assert {"random", "genatt", "decompx.plus", "attcat.libra"} <= {row.method for row in verdict.rows}
    assert "it needs gates" in verdict.left_out["diffmask"]
    assert all(reason for reason in verdict.left_out.values())


def test_a_metric_that_does_not_decide_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("patchlight.metrics.sanity.twin", broken)
    monkeypatch.setattr(work, "twin", broken)
    verdict = asked(metrics={**SRG, "randomisation": {}})
    assert not verdict.left_out
    assert not verdict.sanity
    assert verdict.untrained is None
    assert verdict.uncompared == "it failed: no such thing"
    assert "was not compared with itself on an untrained copy of the model: it failed: no such thing." in str(verdict)


def test_a_fill_that_is_made_of_what_remains() -> None:
    score = {"genatt": {"score": "logit"}}
    verdict = asked(metrics={"srg": {"fill": "road", "steps": 2}}, methods=score, images=images(6))
    assert verdict.row("genatt").images == 6
    assert verdict.methods["genatt"] == {"method": "genatt", "score": "logit"}
    assert "road" in verdict.blanked


@pytest.mark.parametrize("metric", ["road", "perturbation"])
def test_a_head_without_probabilities(metric: str) -> None:
    """Of plain numbers the logits are read."""
    vit = tiny().ask(heads.Neurons(1, [3, 17, 5]))
    assert lacking("probability", vit) is not None
    settings = {"quantity": "logit", "fill": "zero", "target_class": "prediction"}
    verdict = asked(vit=vit, metrics={metric: settings}, methods=["genatt"], images=images(6))
    assert verdict.row("genatt").images == 6
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    top = vit.logits(images(6)[order]).amax(1).mean()
    assert verdict.score == pytest.approx(float(top), rel=1e-4)


@pytest.mark.parametrize("budget", [14.0, 20.0])
def test_time_is_kept_for_the_untrained_copy(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch)
    verdict = asked(budget=budget, images=images(300), worth=0.3)
    assert verdict.images >= 6
    assert verdict.untrained is not None
    assert not verdict.uncompared
    assert verdict.seconds <= 1.1 * budget


def test_one_waits_for_the_logits() -> None:
    """A GPU's answer is there at once, and its numbers are not."""
    waited: list[bool] = []
    logits = SimpleNamespace(cpu=lambda: waited.append(True))
    assert forward_seconds(SimpleNamespace(logits=lambda _: logits), images(1), 1.0) >= 0  # type: ignore[arg-type]
    assert len(waited) == 3


def test_the_panel_has_what_works_and_sampling_methods_fit_the_time() -> None:
    works, refused = choose_methods(None, tiny())
    assert list(works)[:3] == ["random", "genatt", "decompx.plus"]
    assert {"tis", "attcat.libra", "rise"} <= set(works)
    assert "it needs gates" in refused["diffmask"]
    assert list(choose_methods(["auto", "genatt"], tiny())[0]) == ["random", "fullgrad-plus.libra", "genatt"]
    tis = resolve("tis")
    fewer = fit_samples(tis, 0.01, 1.0)
    assert not isinstance(fewer, str)
    assert fewer.label == "tis(samples=128)"
    assert method_spec(fewer) == {"method": "tis", "samples": 128}
    assert fit_samples(tis, 0.01, 100.0) is tis
    assert "even with only 64 samples" in str(fit_samples(tis, 0.01, 0.1))
    assert fit_samples(resolve("genatt"), 1.0, 0.0).label == "genatt"  # type: ignore[union-attr]


def test_a_folder_of_photographs() -> None:
    folder = pocket.PHOTOS
    verdict = pl.recommend(
        pl.load("pocket"), folder, budget="5m", methods=["decompx.plus", "rollout", "ixg"], metrics=SRG, progress=False
    )
    assert verdict.best == "decompx.plus"
    best = pl.explain(pl.load("pocket"), folder / "cat.jpg", {"it": verdict.methods["decompx.plus"]})
    assert best["it"].method == "decompx.plus"

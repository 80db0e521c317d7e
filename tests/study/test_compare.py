"""`compare` is `explain` and `evaluate` of every pair, batch by batch: the same numbers and maps, and nothing kept."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import patchlight as pl
from patchlight.core.errors import LongRun
from patchlight.methods.requests import resolve
from patchlight.metrics import base
from patchlight.metrics.base import Evaluations, resolve_metric
from patchlight.study.cost import explain_forwards, measure_seconds
from tests.families import images, shared

METHODS = ["genatt", "ixg.plus", "random"]
METRICS = {"short": {"metric": "deletion", "steps": 3}, "sparseness": {}}


def watched(batch: Tensor, alive: list[int]) -> Iterator[Tensor]:
    """Images one after another; how many of them are alive when each is asked for."""
    given: list[weakref.ref[Tensor]] = []
    gc.freeze()  # what is older need not be looked through
    for image in batch:
        gc.collect()
        alive.append(sum(ref() is not None for ref in given))
        one = image.clone()
        given.append(weakref.ref(one))
        yield one
    gc.unfreeze()


def same(first: pl.Evaluation, second: pl.Evaluation) -> bool:
    return bool((first.values - second.values).abs().max() < 1e-5)


def test_it_is_explain_and_evaluate() -> None:
    vit = shared("vit")
    batch = images(vit, 7)
    found = pl.compare(vit, batch, METHODS, METRICS, batch_size=3, seed=2)
    assert found.methods == METHODS
    assert found.metrics == list(METRICS)
    maps = pl.explain(vit, batch, METHODS, seed=2)
    by_method = pl.evaluate(vit, batch, maps, METRICS, seed=2)
    for method in METHODS:
        alone = pl.evaluate(vit, batch, maps[method], METRICS, seed=2)
        for metric in METRICS:
            assert same(found.evaluations[method][metric], alone[metric])
            assert same(by_method[method][metric], alone[metric])
        assert len(found.maps[method]) == 4
        assert (found.maps[method].scores - maps[method].scores[:4]).abs().max() < 1e-5
        assert found.maps[method].images == maps[method].images[:4]
        assert found.maps[method].settings == maps[method].settings
        assert len(found.maps[method].photos) == 4


def test_targets_labels_and_labels_of_methods() -> None:
    vit = shared("vit")
    batch = images(vit, 3)
    asked = {"a": {"method": "genatt"}, "b": {"method": "rollout", "start": 1}}
    found = pl.compare(vit, batch, asked, "token-deletion", target=2, labels=[0, 1, 2], shown=2)
    assert found.maps["b"].settings["start"] == 1
    assert found.maps["a"].target.tolist() == [2, 2]
    want = pl.evaluate(vit, batch, pl.explain(vit, batch, "genatt", 2), "token-deletion", labels=[0, 1, 2])
    assert same(found.evaluations["a"]["token-deletion"], want)
    assert pl.compare(vit, batch, "genatt", "sparseness", shown=0).maps == {}


def test_a_stream_is_dropped_as_it_goes() -> None:
    vit = shared("vit")
    batch = images(vit, 8)
    alive: list[int] = []
    metrics: dict[str, Any] = {"sparseness": {}, "max-sensitivity": {"samples": 1}}
    found = pl.compare(vit, watched(batch, alive), METHODS, metrics, batch_size=2, shown=2)
    assert len(found.evaluations["genatt"]["sparseness"]) == 8
    assert max(alive) <= 3, f"at most a batch and the next image: {alive}"
    alive.clear()
    values = pl.evaluate(vit, watched(batch, alive), "genatt", "deletion", steps=2, batch_size=2).values
    assert max(alive) <= 3
    assert (values - pl.evaluate(vit, batch, "genatt", "deletion", steps=2).values).abs().max() < 1e-5
    alive.clear()
    pl.explain(vit, watched(batch, alive), METHODS, batch_size=2)
    assert max(alive) <= 3


def test_loaders_and_the_labels_that_come_with_them() -> None:
    vit = shared("vit")
    batch, labels = images(vit, 7), torch.tensor([0, 1, 2, 3, 4, 5, 6])
    loader = DataLoader(TensorDataset(batch, labels), batch_size=3)
    want = pl.evaluate(vit, batch, "genatt", "token-deletion", target_class="label", labels=labels)
    for stream in (loader, iter(zip(batch, labels.tolist(), strict=True)), TensorDataset(batch, labels)):
        found = pl.evaluate(vit, stream, "genatt", "token-deletion", target_class="label", labels=True, batch_size=2)
        assert same(found, want)
    compared = pl.compare(
        vit, loader, ["genatt"], {"token-deletion": {"target_class": "label"}}, labels=True, batch_size=2
    )
    assert same(compared.evaluations["genatt"]["token-deletion"], want)
    silent = pl.evaluate(vit, loader, "genatt", "sparseness")
    assert same(silent, pl.evaluate(vit, batch, "genatt", "sparseness")), "labels are left alone unless asked for"


@pytest.mark.filterwarnings("ignore::patchlight.UndefinedMetric")
def test_labels_that_do_not_come_are_missed() -> None:
    vit = shared("vit")
    batch = images(vit, 3)
    for given in (batch, list(batch), iter(batch)):
        with pytest.raises(pl.PatchlightError, match="have no labels; give a list"):
            pl.evaluate(vit, given, "genatt", "sparseness", labels=True)
    with pytest.raises(pl.PatchlightError, match="2 labels were given for 3 images"):
        pl.evaluate(vit, iter([(batch, torch.tensor([0, 1]))]), "genatt", "sparseness", labels=True)
    with pytest.raises(pl.PatchlightError, match="target 7 is out of range"):
        pl.evaluate(vit, iter([(batch, torch.tensor([0, 1, 7]))]), "genatt", "sparseness", labels=True)


def test_several_maps_are_measured_each_by_its_own() -> None:
    vit = shared("vit")
    batch = images(vit, 3)
    given: dict[str, Any] = {
        "made": pl.explain(vit, batch, "rollout", target=1),
        "array": torch.rand(3, 4, 4),
        "named": "genatt",
        "set": {"method": "rollout", "start": 1},
        "callable": lambda vit, images, targets, seed: torch.rand(len(images), *vit.grid),
    }
    found = pl.evaluate(vit, batch, given, "sparseness")
    assert isinstance(found, Evaluations)
    assert list(found) == list(given)
    for label in ("made", "array", "named"):
        assert same(found[label], pl.evaluate(vit, batch, given[label], "sparseness"))
    assert same(found["set"], pl.evaluate(vit, batch, pl.explain(vit, batch, "rollout", start=1), "sparseness"))
    both = pl.evaluate(vit, batch, {"named": "genatt"}, ["sparseness", "deletion"], batch_size=2)
    assert list(both["named"]) == ["sparseness", "deletion"]
    listed = pl.evaluate(vit, batch, ["rollout", "genatt"], "sparseness")
    assert list(listed) == ["rollout", "genatt"]
    assert same(listed["genatt"], found["named"])


def test_wrong_maps_of_several_are_refused_and_warnings_name_theirs() -> None:
    vit = shared("vit")
    batch = images(vit, 3)
    maps = pl.explain(vit, batch, ["genatt", "rollout"])
    with pytest.raises(pl.PatchlightError, match="image 0 is not the one"):
        pl.evaluate(vit, batch.flip(0), maps, "sparseness")
    with pytest.raises(pl.PatchlightError, match="no maps were given"):
        pl.evaluate(vit, batch, {}, "sparseness")
    with pytest.raises(pl.PatchlightError, match="no method is called 'genat'"):
        pl.evaluate(vit, batch, {"a": "genat"}, "sparseness")
    with pytest.raises(pl.PatchlightError, match="explains images itself"):
        pl.evaluate(vit, batch, {"a": "genatt", "b": torch.rand(3, 4, 4)}, "max-sensitivity")
    with pytest.warns(pl.UndefinedMetric, match="the map of image 0, 1, 2 by flat is constant"):
        pl.evaluate(vit, batch, {"flat": torch.ones(3, 4, 4), "genatt": "genatt"}, "deletion", steps=2)
    broken = torch.rand(3, 4, 4)
    broken[1] = torch.nan
    with pytest.warns(pl.UndefinedMetric, match="deletion of broken: no value for 1 of 3 images"):
        found = pl.evaluate(vit, batch, {"broken": broken, "genatt": "genatt"}, "deletion", steps=2)
    assert (found["broken"].count, found["genatt"].count) == (2, 3)
    with pytest.raises(pl.Unsupported, match="'transatt' does not work here"):
        pl.compare(shared("siglip"), images(shared("siglip"), 2), ["genatt", "transatt"], "sparseness")


def test_compare_takes_names_under_labels_and_says_where_settings_belong() -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    found = pl.compare(vit, batch, {"mine": "rollout"}, {"gini": "sparseness"})
    assert (found.methods, found.metrics) == (["mine"], ["gini"])
    with pytest.raises(pl.PatchlightError, match=r"no option 'steps'; give settings with their metric or method"):
        pl.compare(vit, batch, ["rollout"], "deletion", steps=2)  # type: ignore[call-arg]
    with pytest.raises(pl.PatchlightError, match=r"no option 'preset'; did .*\? Give settings with their metric"):
        pl.compare(vit, batch, ["rollout"], "deletion", preset="tis")  # type: ignore[call-arg]
    with pytest.raises(pl.PatchlightError, match="no option 'metric'; did you mean 'metrics'"):
        pl.compare(vit, batch, ["rollout"], metric="deletion")  # type: ignore[call-arg]


def synthetic(values: dict[str, Tensor], higher: bool = True) -> pl.Comparison:
    of = {m: {"score": pl.Evaluation("score", v, higher, (0.0, 1.0))} for m, v in values.items()}
    return pl.Comparison("toy", of, pl.explain(shared("vit"), images(shared("vit"), 2), ["genatt"]))


def test_the_table_says_direction_interval_best_and_ties() -> None:
    base = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.5
    values = {"good": base + 0.1, "alike": base + 0.099 + 0.05 * noise, "bad": base - 0.2}
    text = str(synthetic(values))
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert lines["method"].split()[1:] == ["score", "↑"]
    assert sorted(line[-1] for name, line in lines.items() if name in ("good", "alike")) == ["*", "†"]
    low, high = synthetic(values).evaluations["bad"]["score"].interval()
    assert lines["bad"].endswith(f"{values['bad'].mean():.4g} [{low:.4g}, {high:.4g}]")
    assert "toy, 40 images, mean" in text
    assert "no significant difference to the best" in text
    assert repr(synthetic(values)) == text
    lower = synthetic(values, higher=False)
    assert lower.marks["bad", "score"] == "best"
    assert "score ↓" in str(lower)
    frame = lower.to_frame()
    assert list(frame.columns[:6]) == ["method", "metric", "mean", "low", "high", "count"]
    assert frame.set_index("method")["rank"]["bad"] == 1
    assert frame["mark"].tolist() == ["", "", "best"]
    assert "no significant differences by score (Friedman test, 5 %)" in str(
        synthetic({"a": base, "b": base + 1e-3 * noise})
    )
    few = str(synthetic({"a": base[:5], "b": base[:5] + 1}))
    assert "*" not in few
    assert "fewer than 6 images" in few


def test_the_best_is_named_only_where_methods_differ() -> None:
    base = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert synthetic({"bad": base - 0.2, "good": base + 0.1}).best == "good"
    assert synthetic({"bad": base - 0.2, "good": base + 0.1}, higher=False).best == "bad"
    assert synthetic({"a": base, "b": base.clone()}).best is None
    assert synthetic({"a": base[:5], "b": base[:5] + 1}).best is None, "five images are too few"


def test_methods_that_ignore_the_class_are_marked() -> None:
    vit = shared("vit")
    found = pl.compare(vit, images(vit, 2), ["genatt", "rollout", "random"], "sparseness")
    assert found.ignores_class == ("rollout",)
    for text in (str(found), found._repr_html_()):
        assert "rollout (ignores the class)" in text
        assert text.count("(ignores the class)") == 1
    assert found.to_frame()["ignores_class"].tolist() == [False, True, False]
    assert "\nfullgrad-plus.libra (auto) " in str(pl.compare(vit, images(vit, 2), ["auto", "random"], "sparseness"))


def test_the_default_is_cheap_and_a_long_comparison_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit")
    monkeypatch.setattr("patchlight.study.cost.forward_seconds", lambda *about: 1.0)
    with pytest.warns(LongRun, match=r"2 methods by 1 metric on 1 image will take about 2 min; fewer images"):
        found = pl.compare(vit, images(vit, 1), ["genatt", "random"])
    assert found.evaluations["genatt"]["ins-del"].settings["steps"] == 28
    with warnings.catch_warnings():
        warnings.simplefilter("error", LongRun)
        pl.compare(vit, images(vit, 1), ["genatt", "random"], "sparseness")
    monkeypatch.undo()
    with pytest.warns(LongRun, match=r"on 90000 images will take about [\d.]+ (min|h)"), pytest.raises(KeyError):
        pl.compare(vit, _Endless(), ["genatt"])


class _Endless(list[Any]):
    """Many images, none of which can be read."""

    def __len__(self) -> int:
        return 90_000

    def __getitem__(self, index: Any) -> Any:
        raise KeyError


def test_the_figure_has_a_row_per_image_and_a_column_per_method(tmp_path: Path) -> None:
    vit = shared("vit")
    for i in range(3):
        Image.effect_noise((90, 60), 80).convert("RGB").save(tmp_path / f"{i}.png")
    found = pl.compare(vit, [tmp_path / f"{i}.png" for i in range(3)], METHODS, "sparseness")
    drawn = found.figure(tmp_path / "f.png")
    assert Image.open(tmp_path / "f.png").size[0] > 400
    assert len([a for a in drawn.axes if a.get_position().height * drawn.get_figheight() > 1]) == 3 * (1 + len(METHODS))
    assert [t.get_text() for t in drawn.texts if t.get_text() != "ignores the class"][: len(METHODS)] == METHODS


def test_results_can_be_carried_elsewhere() -> None:
    vit = shared("vit")
    found = pl.compare(vit, images(vit, 2), ["genatt"], "sparseness")
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == str(found)
    several = pickle.loads(pickle.dumps(pl.evaluate(vit, images(vit, 2), {"a": "genatt"}, "sparseness")))
    assert several.by == "method"


def test_progress_is_reported_in_whole_images() -> None:
    vit = shared("vit")
    told: list[Any] = []
    pl.compare(vit, images(vit, 3), METHODS, METRICS, batch_size=2, progress=lambda *done: told.append(done))
    assert told == [(2, 3), (3, 3)]


def test_names_are_resolved_before_anything_is_read() -> None:
    def never() -> Iterator[Tensor]:
        raise AssertionError("read")
        yield

    for methods, metrics, words in (
        (["genat"], "sparseness", "did you mean 'genatt'"),
        (["genatt"], "sparsness", "did you mean 'sparseness'"),
        ([], "sparseness", "no method was named"),
        (["genatt"], {"deletion": {"step": 3}}, "did you mean 'steps'"),
    ):
        with pytest.raises(pl.PatchlightError, match=words):
            pl.compare(shared("vit"), never(), methods, metrics)


def test_estimates_count_the_samples() -> None:
    vit = shared("vit")
    many, few = (resolve_metric("faithfulness-correlation", {"samples": n, "shares": (0.2, 0.5)}) for n in (100, 10))
    assert [measure_seconds(each, vit, 1.0, 1.0) for each in (many, few)] == [201, 21]
    assert measure_seconds(resolve_metric("infidelity", {"samples": 40}), vit, 2.0, 1.0) == 82
    assert measure_seconds(resolve_metric("road", {"shares": (0.2, 0.5)}), vit, 1.0, 1.0) == 6
    assert all(measure_seconds(resolve_metric(name), vit, 1.0, 1.0) > 0 for name in base.METRICS)
    assert explain_forwards(resolve("dave", {"samples": 30})) == 90
    assert all(explain_forwards(resolve(name), vit) > 0 for name in (info.name for info in pl.list_methods()))

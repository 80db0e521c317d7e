"""The contracts: what every method keeps on every model (`check_method`), and every metric (`check_metric`).

A method or metric is covered by being registered.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.errors import DegenerateMap, PatchlightError, UndefinedMetric, Unsupported
from patchlight.core.registry import Entry, Setting
from patchlight.core.resize import to_pixels
from patchlight.core.targets import Targets
from patchlight.engine import explain
from patchlight.methods.base import METHODS
from patchlight.methods.requests import Request, list_methods, refusal, resolve
from patchlight.metrics.base import Evaluation, MapFunction, MetricRequest, resolve_metric
from patchlight.study.evaluate import evaluate

compared: Callable[[str, float, float], None] | None = None
"""Called with (what, error, limit) by each comparison of a contract that holds, where set."""


def check_method(
    name: str, vit: Anatomy, images: Tensor, double: Anatomy | None = None, settings: Mapping[str, Any] | None = None
) -> None:
    """Assert the contract of method `name` on a model with B >= 2 images.

    Shape, type, finiteness, batch = loop, seeds, targets, precision, provenance, and a model left as it was found; or
    a clear refusal where the method does not support the model. `double` is the same model in float64: where it is
    given, batches and targets are compared there, out of reach of rounding.
    """
    given = {**resolve(name).method.quick, **(settings or {})}
    trial = _MethodTrial(resolve(name, given), vit, images, given)
    if refusal(trial.request, vit) is not None:
        trial.check_refusal()
        return
    before = _state(vit, images)
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)
        first = trial.check_result()
        trial.check_seed(first)
        trial.check_modes(first)
        steady, whole = trial, first
        if double is not None:
            steady = replace(trial, vit=double, images=images.double())
            whole = steady.run()
            assert torch.equal(whole.target, first.target), "float64 predicts another class"
            trial.close(whole.scores, first.scores, "float32 and float64", tolerance=2e-3)
        steady.check_batch(whole)
        steady.check_targets(whole)
    trial.check_provenance(first)
    assert torch.equal(torch.get_rng_state(), random_state), "the global random state was moved"
    _check_untouched(before, _state(vit, images))


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two maps, ties given their mean rank."""
    from scipy.stats import spearmanr

    return float(spearmanr(a.flatten().numpy(), b.flatten().numpy()).statistic)


@dataclass(frozen=True)
class _MethodTrial:
    """A method under test, and all that `explain` is given."""

    request: Request
    vit: Anatomy
    images: Tensor
    settings: Mapping[str, Any]

    def run(self, **options: Any) -> Attribution:
        result = explain(self.vit, self.images, self.request.label, **options, **self.settings)
        assert isinstance(result, Attribution)
        return result

    def close(self, a: Tensor, b: Tensor, what: str, tolerance: float = 1e-5) -> None:
        """Equal to `tolerance` of the map's size for exact methods, in rank for discrete ones."""
        assert a.shape == b.shape, f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
        if self.request.method.exact:
            scale = float(a.abs().max().clamp_min(1e-12))
            worst = float((a - b).abs().max()) / scale
            assert worst <= tolerance, f"{what}: maps differ by {worst:.1e} of their maximum"
        else:
            tolerance = 0.01
            ranks = [spearman(one, other) for one, other in zip(a.flatten(0, -3), b.flatten(0, -3), strict=True)]
            worst = 1 - float(torch.tensor(ranks, dtype=torch.float64).min())
            assert worst <= tolerance, f"{what}: rank correlation {1 - worst:.3f}"
        if compared is not None:
            compared(what, worst, tolerance)

    def check_refusal(self) -> None:
        request, vit = self.request, self.vit
        told = _complaint(lambda: explain(vit, self.images, request.label), Unsupported)
        assert request.method.name in told, f"the refusal does not name the method: {told}"
        assert (refusal(request, vit) or "") in told, f"the refusal gives no reason: {told}"
        row = next(m for m in list_methods(vit) if m.name == request.method.name)
        if request.name == request.method.name:  # a composition may be refused where the method itself works
            assert row.supported is False, f"methods({vit.name}) calls {row.name} supported"
            assert row.reason

    def check_result(self) -> Attribution:
        att, request, vit = self.run(), self.request, self.vit
        grid = vit.grid if request.level == "token" else vit.preprocess.size
        assert tuple(att.scores.shape) == (len(self.images), *grid), f"scores have shape {list(att.scores.shape)}"
        assert att.grid == grid, "att.grid is not the scores' own"
        assert att.level == request.level, "att.level is not what was asked"
        assert att.scores.dtype == torch.float32, f"scores are {att.scores.dtype}"
        assert att.scores.device.type == "cpu", "scores are not on the CPU"
        assert not att.scores.requires_grad, "scores hold on to a graph"
        assert bool(torch.isfinite(att.scores).all()), "scores are not finite"
        negative = request.method.nonnegative and bool((att.scores < 0).any())
        assert not negative, "scores of a non-negative method are negative"
        flat = att.scores.flatten(1)
        assert bool((flat.amax(1) > flat.amin(1)).any()), "every map is constant"
        return att

    def check_batch(self, whole: Attribution) -> None:
        single = [replace(self, images=image[None]).run().scores for image in self.images]
        self.close(whole.scores, torch.cat(single), "a batch and single calls")
        self.close(whole.scores, self.run(batch_size=1).scores, "one batch and batch_size=1")
        names = ("rawatt", "ixg.libra", "random")
        others: dict[str, Any] = {name: {} for name in names if refusal(resolve(name), self.vit) is None}
        together = explain(self.vit, self.images, {**others, self.request.label: self.settings})
        self.close(whole.scores, together[self.request.label].scores, "alone and among others")

    def check_seed(self, first: Attribution) -> None:
        assert torch.equal(first.scores, self.run().scores), "two equal calls differ"
        same = torch.equal(first.scores, self.run(seed=1).scores)
        stochastic = self.request.method.stochastic
        assert same != stochastic, f"another seed {'does not change' if same else 'changes'} the map"

    def check_targets(self, first: Attribution) -> None:
        vit, count = self.vit, len(self.images)
        assert first.target.shape == (count,), "the explained classes are not recorded"
        explicit = self.run(target=first.target.tolist())
        self.close(first.scores, explicit.scores, "the prediction, by default and by name")
        other = (first.target + 1) % vit.outcomes
        changed = self.run(target=other)
        moved = not torch.equal(first.scores, changed.scores)
        mirrored = vit.classes == 1 and self.request.method.unsigned  # y and -y have gradients of one size
        own = moved and vit.rows_differ  # what a class reads is its own even where the map is of no class
        expected = mirrored or own or moved != self.request.ignores_class
        assert expected, f"another class {'changes' if moved else 'does not change'} the map"
        both = self.run(target=torch.stack([first.target, other], 1))
        assert both.scores.shape[:2] == (count, 2), f"two classes give shape {list(both.scores.shape)}"
        self.close(first.scores, both.scores[:, 0], "the first of two classes and alone")
        self.close(changed.scores, both.scores[:, 1], "the second of two classes and alone")
        if self.request.suited(vit).ignores_class and self.request.name != "random":
            sentence = _complaint(lambda: self.run(target=(0, 1)), Unsupported)
            assert "ignores the class" in sentence, "a method that ignores the class takes a pair of classes"
        else:
            pair = self.run(target=(0, 1))
            assert bool(torch.isfinite(pair.scores).all()), "a pair of classes gives no finite map"

    def check_modes(self, first: Attribution) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                inside = self.run().scores
            self.close(first.scores, inside, f"inside {mode.__name__} and outside")

    def check_provenance(self, first: Attribution) -> None:
        entry, label = self.request.method, self.request.label
        assert first.method == self.request.name
        assert first.model == self.vit.name
        assert {"patchlight", "torch"} <= first.versions.keys()
        with tempfile.TemporaryDirectory() as folder:
            back = Attribution.load(first.save(Path(folder) / "out"))
        assert torch.equal(back.scores, first.scores)
        assert torch.equal(back.target, first.target)
        assert (back.method, back.model, back.level, back.seed) == (first.method, first.model, first.level, first.seed)
        _check_words(entry, entry.cost, entry.settings(self.request.composition))
        assert all(resolve(alias).method is entry for alias in entry.aliases), "an alias leads elsewhere"
        assert "no_such_setting" in _complaint(lambda: resolve(label, {"no_such_setting": 1}), PatchlightError)


def _check_words(entry: Entry, cost: str, settings: Mapping[str, Setting]) -> None:
    assert entry.summary, "no docstring"
    assert entry.paper, "no paper"
    assert cost, "no cost"
    missing = [name for name, setting in settings.items() if not setting.text]
    assert not missing, f"settings without a line under `Args:` in the docstring: {missing}"


def _complaint(action: Callable[[], object], kind: type[PatchlightError]) -> str:
    """The sentence an action is refused with."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("this should have been refused")


def _state(vit: Anatomy, images: Tensor) -> dict[str, Any]:
    model = vit.model
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "parameters": copy.deepcopy(model.state_dict()),
        "flags": [p.requires_grad for p in model.parameters()],
        "gradients": [p.grad is None for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [sum(len(getattr(m, h)) for h in hooks) for m in model.modules()],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "logits": vit.logits(images),
        "images": images.clone(),
        "asked": images.requires_grad,
    }


def _check_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key, was in before.items():
        now = after[key]
        if isinstance(was, Tensor):
            assert torch.equal(was, now), f"{key} changed"
        elif key == "parameters":
            assert was.keys() == now.keys(), "the model has other parameters now"
            assert all(torch.equal(was[k], now[k]) for k in was), "a parameter changed"
        else:
            assert was == now, f"{key} changed"


def contract_names() -> list[str]:
    """Every registered method, and each composition and rule once on a method it fits."""
    followed = ["genatt.libra", "ixg.plus", "ixg.skipplus.libra", "rawatt.plus", "genatt.rollout", "gradcam.skipplus"]
    followed += ["ixg.conservative", "genatt.attnlrp"]
    return [*METHODS, *followed]


def check_metric(
    name: str,
    vit: Anatomy,
    images: Tensor,
    double: Anatomy | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    labels: Sequence[int | None] | None = None,
    boxes: Sequence[Any] | None = None,
    masks: Tensor | None = None,
    better: Tensor | MapFunction | None = None,
    worse: Tensor | MapFunction | None = None,
    chance: Tensor | None = None,
) -> Evaluation | None:
    """Assert the contract of metric `name` on a model with B >= 2 images and the annotations it needs.

    One value per image and a rising curve's axis, values within the bounds that it declares, batch = loop = among other
    metrics (which keep theirs), maps of patches and of pixels, the same seed the same values (and another seed other
    ones just where the metric is `stochastic`, on maps without ties), a refusal without each annotation, and a model
    left as it was found. A constant map is told in a warning, and has a value within the bounds or none; one that holds
    NaN, or lies on an image that misses an annotation, has none, a reason and a warning. The others keep their values.

    `better` and `worse` are maps [B,h,w] of these images, or functions that make some: it must prefer the first.
    `chance` [B] is the closed form of its value on maps drawn from U(0, 1), where it has one; NaN for images that have
    no value. `double` is the same model in float64: where it is given, batches are compared there, out of reach of
    rounding. Returns what it found on random maps; None where it refuses the model, which it must do in a sentence.

    >>> check_metric("pointing-game", vit, images, boxes=boxes, chance=areas)      # doctest: +SKIP
    """
    entry = resolve_metric(name).metric
    asked = {**entry.quick, **(settings or {})}
    notes = {"labels": labels, "boxes": boxes, "masks": masks}
    trial = _MetricTrial(
        resolve_metric(name, asked), asked, vit, images, {k: v for k, v in notes.items() if v is not None}
    )
    before, random_state = _state(vit, images), torch.get_rng_state()
    try:
        first, told = trial.run(trial.maps)
    except Unsupported as error:
        _check_named(vit, str(error))
        return None
    _check_values(trial, first, told)
    _check_metric_seed(trial, first)
    steady, whole = trial, first
    if double is not None:
        steady = replace(trial, vit=double, images=images.double())
        whole = steady.run(steady.maps)[0]
    _check_metric_batch(steady, whole)
    _check_odd_maps(trial, first)
    _check_annotations(trial, first)
    if better is not None and worse is not None:
        _check_direction(trial, better, worse)
    if chance is not None:
        _check_chance(trial, chance)
    _check_entry(trial)
    assert torch.equal(torch.get_rng_state(), random_state), "the global random state was moved"
    _check_untouched(before, _state(vit, images))
    return first


def _check_named(vit: Anatomy, reason: str) -> None:
    assert vit.name in reason, f"the refusal does not name the model: {reason}"


DRAWS = 24
"""Random maps of each image that `chance` is compared with."""


@dataclass(frozen=True)
class _MetricTrial:
    """A metric under test: all that `evaluate` is given but the maps."""

    request: MetricRequest
    settings: Mapping[str, Any]
    vit: Anatomy
    images: Tensor
    notes: Mapping[str, Any]

    @property
    def maps(self) -> Tensor | MapFunction:
        """Smooth random maps without ties; for a metric that explains itself, a function that reads the model."""
        return _tokens_size if self.request.metric.explains else self.smooth()

    def smooth(self) -> Tensor:
        coarse = self.drawn(size=self.vit.grid)
        return to_pixels(coarse, self.images.shape[-2:], self.vit.extent) + 1e-3 * self.drawn()

    def drawn(self, seed: int = 0, size: Sequence[int] | None = None) -> Tensor:
        """Maps [B,H,W], or of another size, from U(0, 1)."""
        size = self.images.shape[-2:] if size is None else size
        generator = torch.Generator().manual_seed(seed)
        maps = torch.rand(len(self.images), *size, generator=generator, dtype=torch.float64)
        return maps.to(self.vit.device, self.vit.dtype)

    def only(self, rows: Sequence[int]) -> _MetricTrial:
        """The same trial on some of the images, which may repeat."""
        notes = {
            key: note[rows] if isinstance(note, Tensor) else [note[i] for i in rows] for key, note in self.notes.items()
        }
        return replace(self, images=self.images[list(rows)], notes=notes)

    def run(self, maps: Tensor | MapFunction, **options: Any) -> tuple[Evaluation, list[str]]:
        """The metric's verdict, and what it warned of."""
        found, told = self.together(maps, {self.request.label: self.settings}, **options)
        return found[self.request.label], told

    def together(
        self, maps: Tensor | MapFunction, asked: Mapping[str, Mapping[str, Any]], **options: Any
    ) -> tuple[dict[str, Evaluation], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = evaluate(self.vit, self.images, maps, asked, **self.notes, **options)
        return found, [str(w.message) for w in caught if issubclass(w.category, UndefinedMetric)]


@torch.no_grad()
def _tokens_size(vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
    """Maps of the size of each patch's last token; in a hierarchical model, of the last in the stage of its grid."""
    last = vit.run(vit.embed(images), stop=vit.stage_end if vit.hierarchical else None)
    return vit.patches(torch.linalg.vector_norm(last, dim=-1))


def _check_values(trial: _MetricTrial, found: Evaluation, told: Sequence[str], whole: bool = True) -> None:
    """One value in the bounds for each image, or a reason why there is none, which was also told."""
    count, (low, high) = len(trial.images), found.bounds
    values, there = found.values, found.values.isfinite()
    assert tuple(values.shape) == (count,), f"values have shape {list(values.shape)}"
    assert (values.dtype, values.device.type) == (torch.float64, "cpu"), f"values are {values.dtype} on {values.device}"
    assert not values.requires_grad, "values hold on to a graph"
    assert not whole or bool(there.any()), f"no image has a value: {found.reasons}"
    assert len(found.reasons) == count, f"{len(found.reasons)} reasons for {count} images"
    for value, reason in zip(there.tolist(), found.reasons, strict=True):
        assert value == (reason == ""), f"a value {'with' if value else 'that is missing without'} a reason: {reason}"
    assert bool(there.all()) or any("no value for" in line for line in told), "missing values are not told"
    room = 1e-6 * max([1.0, *(abs(side) for side in (low, high) if math.isfinite(side))])
    inside = values[there]
    assert bool((inside >= low - room).all() and (inside <= high + room).all()), f"{inside} is not in [{low}, {high}]"
    assert type(found.higher_is_better) is bool, "no direction"
    assert found.metric == trial.request.metric.name
    assert found.settings == trial.request.suited(trial.vit).settings, "other settings are recorded"
    if found.curve is not None:
        assert found.x is not None, "a curve over nothing"
        assert tuple(found.curve.shape) == (count, len(found.x)), f"the curve has shape {list(found.curve.shape)}"
        assert bool((found.x.diff() >= 0).all()), "the curve's axis does not rise"
        assert bool(found.curve[there].isfinite().all()), "the curve of a value is not finite"


def _agree(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """The same values are missing, and the others differ by at most `tolerance` of the largest (or of 1)."""
    assert torch.equal(found.isnan(), expected.isnan()), f"{what}: other images have a value"
    error = float((found - expected).abs().nan_to_num().max()) if len(found) else 0.0
    error /= max(1.0, float(expected.abs().nan_to_num().max()))
    assert error <= tolerance, f"{what}: values differ by {error:.1e}, {found.tolist()} and {expected.tolist()}"
    if compared is not None:
        compared(what, error, tolerance)


def _check_metric_seed(trial: _MetricTrial, first: Evaluation) -> None:
    again, other = (trial.run(trial.maps, seed=seed)[0].values for seed in (0, 1))
    assert torch.equal(again.nan_to_num(), first.values.nan_to_num()), "two equal calls differ"
    same = torch.equal(other.nan_to_num(), again.nan_to_num())
    stochastic = trial.request.metric.draws(trial.request.settings)
    assert same != stochastic, f"another seed {'does not change' if same else 'changes'} the values"


def _check_metric_batch(trial: _MetricTrial, whole: Evaluation) -> None:
    maps, count = trial.maps, len(trial.images)
    each = [trial.only([i]).run(maps[[i]] if isinstance(maps, Tensor) else maps)[0] for i in range(count)]
    joined = Evaluation.concat(each)
    _agree(joined.values, whole.values, "single calls and a batch")
    _agree(torch.tensor([joined.mean]), torch.tensor([whole.mean]), "the mean of single calls and of a batch")
    _agree(trial.run(maps, batch_size=1)[0].values, whole.values, "batch_size=1 and one batch")
    before, after = (
        {f"{when} {other}": {"metric": other} for other in ("sparseness", "aopc")} for when in ("before", "after")
    )
    others, _ = trial.together(maps, {**before, trial.request.label: trial.settings, **after})
    _agree(others[trial.request.label].values, whole.values, "among others and alone")
    for one, other in zip(before, after, strict=True):
        _agree(others[other].values, others[one].values, f"another metric {other} and {one}", 0.0)


def _check_odd_maps(trial: _MetricTrial, first: Evaluation) -> None:
    """Maps of patches, constant ones and broken ones; those of the other images keep their values."""
    if trial.request.metric.explains:
        maps = trial.maps
        assert callable(maps)
        for fill, word in ((1.0, "constant"), (float("nan"), "NaN")):
            found, told = trial.run(lambda *asked, fill=fill: torch.full_like(maps(*asked), fill))
            _check_odd(trial, found, told, word, fill)
        return
    found, told = trial.run(trial.drawn(size=trial.vit.grid))
    _check_values(trial, found, told)
    for fill, word in ((1.0, "constant"), (0.0, "constant"), (float("nan"), "NaN"), (float("inf"), "NaN")):
        odd = trial.smooth()
        odd[0] = fill
        found, told = trial.run(odd)
        _check_odd(trial, found, told, word, fill)
        _agree(found.values[1:], first.values[1:], f"beside a {word} map and without")


def _check_odd(trial: _MetricTrial, found: Evaluation, told: Sequence[str], word: str, fill: float) -> None:
    _check_values(trial, found, told, whole=False)
    assert any(word in line for line in told), f"a {word} map is not told: {told}"
    assert math.isfinite(fill) or bool(found.values[0].isnan()), f"a map with {fill} has a value"


def _check_annotations(trial: _MetricTrial, first: Evaluation) -> None:
    """Without an annotation there is a refusal, and an image that misses its own does not touch the others."""
    entry = trial.request.metric
    if entry.explains:
        told = _complaint(lambda: trial.run(trial.drawn()), PatchlightError)
        assert entry.name in told, f"the refusal does not name the metric: {told}"
        assert "method" in told, f"the refusal does not say what is needed: {told}"
    for need in entry.needs:
        kinds = need.split(" or ")
        without = replace(trial, notes={k: note for k, note in trial.notes.items() if k not in kinds})
        told = _complaint(lambda without=without: without.run(trial.maps), PatchlightError)  # type: ignore[misc]
        assert entry.name in told, f"the refusal does not name the metric: {told}"
        assert all(kind in told for kind in kinds), f"the refusal does not name {need}: {told}"
        for kind in trial.notes.keys() & kinds:
            partial = replace(trial, notes={**trial.notes, kind: _first_missing(trial.notes[kind])})
            found, warned = partial.run(trial.maps)
            _check_values(trial, found, warned, whole=False)
            assert bool(found.values[0].isnan()), f"an image without {kind} has a value"
            _agree(found.values[1:], first.values[1:], f"beside an image without {kind} and without")


def _first_missing(note: Any) -> Any:
    """Annotations of which the first image has none: no pixel labelled, no boxes, an unknown class."""
    if isinstance(note, Tensor):
        return torch.cat([torch.full_like(note[:1], -1), note[1:]])
    return [None if isinstance(note[0], int) else [], *note[1:]]


def _check_direction(trial: _MetricTrial, better: Tensor | MapFunction, worse: Tensor | MapFunction) -> None:
    good, bad = (trial.run(maps)[0] for maps in (better, worse))
    ahead = good.mean > bad.mean if good.higher_is_better else good.mean < bad.mean
    way = "higher" if good.higher_is_better else "lower"
    assert ahead, f"{way} is better, but the better maps have {good.mean:.4g} and the worse ones {bad.mean:.4g}"


def _check_chance(trial: _MetricTrial, chance: Tensor) -> None:
    """Random maps have their closed form, to five standard errors of their mean and 0.01."""
    if trial.request.metric.explains:

        def drawn(vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
            one = torch.rand(vit.grid, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            return one.to(vit.device, vit.dtype).expand(len(images), -1, -1)

        values = torch.stack([trial.run(drawn, seed=seed)[0].values for seed in range(2)])
    else:
        count = len(trial.images)
        many = trial.only([i for _ in range(DRAWS) for i in range(count)])
        values = many.run(many.drawn(seed=1))[0].values.view(DRAWS, count)
    error = values.std(0) / len(values) ** 0.5
    assert torch.equal(values.isnan().any(0), chance.isnan()), "the closed form exists for other images"
    far = (values.mean(0) - chance).abs() > 5 * error + 0.01
    assert not bool(far.any()), f"random maps have {values.mean(0).tolist()}, not {chance.tolist()}"


def _check_entry(trial: _MetricTrial) -> None:
    entry = trial.request.metric
    _check_words(entry, entry.cost, entry.settings)
    assert all(resolve_metric(alias).metric is entry for alias in entry.aliases), "an alias leads elsewhere"
    told = _complaint(lambda: resolve_metric(entry.name, {"no_such_setting": 1}), PatchlightError)
    assert "no_such_setting" in told
    for preset in entry.presets:
        low, high = entry.limits(resolve_metric(entry.name, {"preset": preset}).settings)
        assert low < high, f"preset '{preset}' has bounds [{low}, {high}]"

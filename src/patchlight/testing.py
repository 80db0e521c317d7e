"""Contract tests that every method (`check_method`) and every metric (`check_metric`) passes on every model."""

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
"""Optional function of (what, error, limit), called for each comparison that passes."""


def check_method(
    name: str, vit: Anatomy, images: Tensor, double: Anatomy | None = None, settings: Mapping[str, Any] | None = None
) -> None:
    """Assert the contract of a method on a model.

    It covers shape, type, finiteness, batch = loop, seeds, targets, precision, provenance and an unchanged model; or a
    clear refusal if the method does not work on the model.

    Args:
        name: The name of the method.
        vit: The model.
        images: At least two preprocessed images [B,C,H,W].
        double: The same model in float64; if given, batches and targets are compared on it, without rounding errors.
        settings: Settings of the method.
    """
    quick = {**resolve(name).method.quick, **(settings or {})}
    trial = _MethodTrial(resolve(name, quick), vit, images, quick)
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
        precise, reference = trial, first
        if double is not None:
            precise = replace(trial, vit=double, images=images.double())
            reference = precise.run()
            assert torch.equal(reference.target, first.target), "float64 predicts another class"
            trial.close(reference.scores, first.scores, "float32 and float64", tolerance=2e-3)
        precise.check_batch(reference)
        precise.check_targets(reference)
    trial.check_provenance(first)
    assert torch.equal(torch.get_rng_state(), random_state), "the global random state changed"
    _check_untouched(before, _state(vit, images))


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two maps; ties have their mean rank."""
    from scipy.stats import spearmanr

    return float(spearmanr(a.flatten().numpy(), b.flatten().numpy()).statistic)


@dataclass(frozen=True)
class _MethodTrial:
    """A method under test and the arguments of `explain`."""

    request: Request
    vit: Anatomy
    images: Tensor
    settings: Mapping[str, Any]

    def run(self, **options: Any) -> Attribution:
        result = explain(self.vit, self.images, self.request.label, **options, **self.settings)
        assert isinstance(result, Attribution)
        return result

    def close(self, a: Tensor, b: Tensor, what: str, tolerance: float = 1e-5) -> None:
        """Assert equality up to `tolerance` of the maximum for exact methods, in rank for discrete ones."""
        assert a.shape == b.shape, f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
        if self.request.method.exact:
            scale = float(a.abs().max().clamp_min(1e-12))
            worst = float((a - b).abs().max()) / scale
            assert worst <= tolerance, f"{what}: maps differ by {worst:.1e} of their maximum"
        else:
            tolerance = 0.01
            ranks = [spearman(x, y) for x, y in zip(a.flatten(0, -3), b.flatten(0, -3), strict=True)]
            worst = 1 - float(torch.tensor(ranks, dtype=torch.float64).min())
            assert worst <= tolerance, f"{what}: rank correlation {1 - worst:.3f}"
        if compared is not None:
            compared(what, worst, tolerance)

    def check_refusal(self) -> None:
        request, vit = self.request, self.vit
        sentence = _refusal(lambda: explain(vit, self.images, request.label, **self.settings), Unsupported)
        assert request.method.name in sentence, f"the refusal does not name the method: {sentence}"
        assert (refusal(request, vit) or "") in sentence, f"the refusal gives no reason: {sentence}"
        row = next(m for m in list_methods(vit) if m.name == request.method.name)
        if request.name == request.method.name:  # a composition may be refused where the method itself works
            assert row.supported is False, f"methods({vit.name}) calls {row.name} supported"
            assert row.reason

    def check_result(self) -> Attribution:
        att, request, vit = self.run(), self.request, self.vit
        grid = vit.grid if request.level == "token" else vit.preprocess.size
        assert tuple(att.scores.shape) == (len(self.images), *grid), f"scores have shape {list(att.scores.shape)}"
        assert att.grid == grid, "att.grid is not that of the scores"
        assert att.level == request.level, "att.level is not that of the request"
        assert att.scores.dtype == torch.float32, f"scores are {att.scores.dtype}"
        assert att.scores.device.type == "cpu", "scores are not on the CPU"
        assert not att.scores.requires_grad, "scores keep a graph"
        assert bool(torch.isfinite(att.scores).all()), "scores are not finite"
        negative = request.method.nonnegative and bool((att.scores < 0).any())
        assert not negative, "scores of a non-negative method are negative"
        flat = att.scores.flatten(1)
        assert bool((flat.amax(1) > flat.amin(1)).any()), "every map is constant"
        return att

    def check_batch(self, batched: Attribution) -> None:
        single = [replace(self, images=image[None]).run().scores for image in self.images]
        self.close(batched.scores, torch.cat(single), "a batch and single calls")
        self.close(batched.scores, self.run(batch_size=1).scores, "one batch and batch_size=1")
        names = ("rawatt", "ixg.libra", "random")
        others: dict[str, Any] = {name: {} for name in names if refusal(resolve(name), self.vit) is None}
        together = explain(self.vit, self.images, {**others, self.request.label: self.settings})
        self.close(batched.scores, together[self.request.label].scores, "alone and among others")

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
        outcomes = vit.prepared(self.images[:1]).outcomes
        if outcomes == 1:
            return  # a question about one number
        other = (first.target + 1) % outcomes
        changed = self.run(target=other)
        differs = not torch.equal(first.scores, changed.scores)
        mirrored = vit.classes == 1 and self.request.method.unsigned  # y and -y have gradients of the same size
        reads_differ = differs and vit.rows_differ  # each class has its own readout, even if the map ignores classes
        expected = mirrored or reads_differ or differs != self.request.ignores_class
        assert expected, f"another class {'changes' if differs else 'does not change'} the map"
        both = self.run(target=torch.stack([first.target, other], 1))
        assert both.scores.shape[:2] == (count, 2), f"two classes give shape {list(both.scores.shape)}"
        self.close(first.scores, both.scores[:, 0], "the first of two classes and alone")
        self.close(changed.scores, both.scores[:, 1], "the second of two classes and alone")
        if self.request.suited(vit).ignores_class and self.request.name != "random":
            sentence = _refusal(lambda: self.run(target=(0, 1)), Unsupported)
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
        assert all(resolve(alias).method is entry for alias in entry.aliases), "an alias names another method"
        assert "no_such_setting" in _refusal(lambda: resolve(label, {"no_such_setting": 1}), PatchlightError)


def _check_words(entry: Entry, cost: str, settings: Mapping[str, Setting]) -> None:
    assert entry.summary, "no docstring"
    assert entry.paper, "no paper"
    assert cost, "no cost"
    missing = [name for name, setting in settings.items() if not setting.text]
    assert not missing, f"settings without a line under `Args:` in the docstring: {missing}"


def _refusal(action: Callable[[], object], kind: type[PatchlightError]) -> str:
    """The message of the error that an action raises."""
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
        "logits": (vit.logits if vit.bare is None or vit.question is None else vit.bare.logits)(images),
        "images": images.clone(),
        "requires_grad of images": images.requires_grad,
    }


def _check_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key, was in before.items():
        now = after[key]
        if isinstance(was, Tensor):
            assert torch.equal(was, now), f"{key} changed"
        elif key == "parameters":
            assert was.keys() == now.keys(), "the names of parameters changed"
            assert all(torch.equal(was[k], now[k]) for k in was), "a parameter changed"
        else:
            assert was == now, f"{key} changed"


def contract_names() -> list[str]:
    """All registered methods, and each composition and rule with one method."""
    composed = ["genatt.libra", "ixg.plus", "ixg.skipplus.libra", "rawatt.plus", "genatt.rollout", "gradcam.skipplus"]
    return [*METHODS, *composed, "ixg.conservative", "genatt.attnlrp", "ixg.gamma"]


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
    """Assert the contract of a metric on a model.

    It covers one value per image within the declared bounds, a rising axis of curves, batch = loop = among other
    metrics, maps of patches and of pixels, seeds (another seed changes values only if the metric is `stochastic`), a
    refusal without each annotation, and an unchanged model. A constant map has a warning, and a value within the bounds
    or none; a map with NaN, or of an image without an annotation, has no value, a reason and a warning; the values of
    other images do not change.

    Args:
        name: The name of the metric.
        vit: The model.
        images: At least two preprocessed images [B,C,H,W].
        double: The same model in float64; if given, batches are compared there, without rounding errors.
        settings: Settings of the metric.
        labels: The true classes, if the metric needs them.
        boxes: Boxes, if the metric needs them.
        masks: Masks, if the metric needs them.
        better: Maps [B,h,w], or a function that computes maps, that the metric must prefer to `worse`.
        worse: See `better`.
        chance: The expected value [B] for maps from U(0, 1), if there is a closed form; NaN for images without a value.

    Returns:
        The evaluation of random maps; None if the metric refuses the model.

    Example:
        >>> check_metric("pointing-game", vit, images, boxes=boxes, chance=areas)               # doctest: +SKIP
    """
    entry = resolve_metric(name).metric
    quick = {**entry.quick, **(settings or {})}
    notes = {k: v for k, v in {"labels": labels, "boxes": boxes, "masks": masks}.items() if v is not None}
    trial = _MetricTrial(resolve_metric(name, quick), quick, vit, images, notes)
    before, random_state = _state(vit, images), torch.get_rng_state()
    try:
        first, warned = trial.run(trial.maps)
    except Unsupported as error:
        assert vit.name in str(error), f"the refusal does not name the model: {error}"  # noqa: PT017
        return None
    _check_values(trial, first, warned)
    _check_metric_seed(trial, first)
    precise, reference = trial, first
    if double is not None:
        precise = replace(trial, vit=double, images=images.double())
        reference = precise.run(precise.maps)[0]
    _check_metric_batch(precise, reference)
    _check_odd_maps(trial, first)
    _check_annotations(trial, first)
    if better is not None and worse is not None:
        _check_direction(trial, better, worse)
    if chance is not None:
        _check_chance(trial, chance)
    _check_entry(trial)
    assert torch.equal(torch.get_rng_state(), random_state), "the global random state changed"
    _check_untouched(before, _state(vit, images))
    return first


DRAWS = 24
"""Random maps per image that `chance` is compared with."""


@dataclass(frozen=True)
class _MetricTrial:
    """A metric under test and the arguments of `evaluate` except the maps."""

    request: MetricRequest
    settings: Mapping[str, Any]
    vit: Anatomy
    images: Tensor
    notes: Mapping[str, Any]

    @property
    def maps(self) -> Tensor | MapFunction:
        """Smooth random maps without ties; for a metric that explains images, a function that reads the model."""
        return _tokens_size if self.request.metric.explains else self.smooth()

    def smooth(self) -> Tensor:
        coarse = self.random_maps(size=self.vit.grid)
        return to_pixels(coarse, self.images.shape[-2:], self.vit.extent) + 1e-3 * self.random_maps()

    def random_maps(self, seed: int = 0, size: Sequence[int] | None = None) -> Tensor:
        """Maps [B,H,W], or of another size, sampled from U(0, 1)."""
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
        """The evaluation and its warnings."""
        evaluations, warned = self.together(maps, {self.request.label: self.settings}, **options)
        return evaluations[self.request.label], warned

    def together(
        self, maps: Tensor | MapFunction, metrics: Mapping[str, Mapping[str, Any]], **options: Any
    ) -> tuple[dict[str, Evaluation], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            evaluations = evaluate(self.vit, self.images, maps, metrics, **self.notes, **options)
        return evaluations, [str(w.message) for w in caught if issubclass(w.category, UndefinedMetric)]


@torch.no_grad()
def _tokens_size(vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
    """The norm of each patch's last token; in a hierarchical model, of the last one in the stage of the grid."""
    last = vit.run(vit.embed(images), stop=vit.stage_end if vit.hierarchical else None)
    return vit.patches(torch.linalg.vector_norm(last, dim=-1))


def _check_values(trial: _MetricTrial, evaluation: Evaluation, warned: Sequence[str], required: bool = True) -> None:
    """Each image has a value within the bounds, or a reason and a warning; if `required`, at least one has a value."""
    count, (low, high) = len(trial.images), evaluation.bounds
    values, exists = evaluation.values, evaluation.values.isfinite()
    assert tuple(values.shape) == (count,), f"values have shape {list(values.shape)}"
    assert (values.dtype, values.device.type) == (torch.float64, "cpu"), f"values are {values.dtype} on {values.device}"
    assert not values.requires_grad, "values keep a graph"
    assert not required or bool(exists.any()), f"no image has a value: {evaluation.reasons}"
    assert len(evaluation.reasons) == count, f"{len(evaluation.reasons)} reasons for {count} images"
    for value, reason in zip(exists.tolist(), evaluation.reasons, strict=True):
        assert value == (reason == ""), f"a value {'with' if value else 'that is missing without'} a reason: {reason}"
    assert bool(exists.all()) or any("no value for" in line for line in warned), "no warning of missing values"
    slack = 1e-6 * max([1.0, *(abs(side) for side in (low, high) if math.isfinite(side))])
    defined = values[exists]
    within = bool((defined >= low - slack).all() and (defined <= high + slack).all())
    assert within, f"{defined} is not in [{low}, {high}]"
    assert type(evaluation.higher_is_better) is bool, "no direction"
    assert evaluation.metric == trial.request.metric.name
    assert evaluation.settings == trial.request.suited(trial.vit).settings, "other settings are recorded"
    if evaluation.curve is not None:
        assert evaluation.x is not None, "a curve without an axis"
        shape = list(evaluation.curve.shape)
        assert shape == [count, len(evaluation.x)], f"the curve has shape {shape}"
        assert bool((evaluation.x.diff() >= 0).all()), "the curve's axis does not rise"
        assert bool(evaluation.curve[exists].isfinite().all()), "the curve of a value is not finite"


def _assert_close(values: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Assert that the same values are missing, and that others differ by at most `tolerance` of the largest (or 1)."""
    assert torch.equal(values.isnan(), expected.isnan()), f"{what}: other images have a value"
    error = float((values - expected).abs().nan_to_num().max()) if len(values) else 0.0
    error /= max(1.0, float(expected.abs().nan_to_num().max()))
    assert error <= tolerance, f"{what}: values differ by {error:.1e}, {values.tolist()} and {expected.tolist()}"
    if compared is not None:
        compared(what, error, tolerance)


def _check_metric_seed(trial: _MetricTrial, first: Evaluation) -> None:
    again, other = (trial.run(trial.maps, seed=seed)[0].values for seed in (0, 1))
    assert torch.equal(again.nan_to_num(), first.values.nan_to_num()), "two equal calls differ"
    same = torch.equal(other.nan_to_num(), again.nan_to_num())
    stochastic = trial.request.metric.draws(trial.request.settings)
    assert same != stochastic, f"another seed {'does not change' if same else 'changes'} the values"


def _check_metric_batch(trial: _MetricTrial, batched: Evaluation) -> None:
    maps, count = trial.maps, len(trial.images)
    singles = [trial.only([i]).run(maps[[i]] if isinstance(maps, Tensor) else maps)[0] for i in range(count)]
    joined = Evaluation.concat(singles)
    _assert_close(joined.values, batched.values, "single calls and a batch")
    _assert_close(torch.tensor([joined.mean]), torch.tensor([batched.mean]), "the mean of single calls and of a batch")
    _assert_close(trial.run(maps, batch_size=1)[0].values, batched.values, "batch_size=1 and one batch")
    before, after = (
        {f"{when} {other}": {"metric": other} for other in ("sparseness", "aopc")} for when in ("before", "after")
    )
    together, _ = trial.together(maps, {**before, trial.request.label: trial.settings, **after})
    _assert_close(together[trial.request.label].values, batched.values, "among others and alone")
    for earlier, later in zip(before, after, strict=True):
        _assert_close(together[later].values, together[earlier].values, f"another metric {later} and {earlier}", 0.0)


def _check_odd_maps(trial: _MetricTrial, first: Evaluation) -> None:
    """Maps of patches, constant maps and maps with NaN; the values of other images do not change."""
    if trial.request.metric.explains:
        maps = trial.maps
        assert callable(maps)
        for fill, word in ((1.0, "constant"), (float("nan"), "NaN")):
            evaluation, warned = trial.run(lambda *arguments, fill=fill: torch.full_like(maps(*arguments), fill))
            _check_odd(trial, evaluation, warned, word, fill)
        return
    evaluation, warned = trial.run(trial.random_maps(size=trial.vit.grid))
    _check_values(trial, evaluation, warned)
    for fill, word in ((1.0, "constant"), (0.0, "constant"), (float("nan"), "NaN"), (float("inf"), "NaN")):
        odd = trial.smooth()
        odd[0] = fill
        evaluation, warned = trial.run(odd)
        _check_odd(trial, evaluation, warned, word, fill)
        _assert_close(evaluation.values[1:], first.values[1:], f"beside a {word} map and without")


def _check_odd(trial: _MetricTrial, evaluation: Evaluation, warned: Sequence[str], word: str, fill: float) -> None:
    _check_values(trial, evaluation, warned, required=False)
    assert any(word in line for line in warned), f"no warning of a {word} map: {warned}"
    assert math.isfinite(fill) or bool(evaluation.values[0].isnan()), f"a map with {fill} has a value"


def _check_annotations(trial: _MetricTrial, first: Evaluation) -> None:
    """A missing annotation is refused; if only one image lacks it, the values of others do not change."""
    entry = trial.request.metric
    if entry.explains:
        sentence = _refusal(lambda: trial.run(trial.random_maps()), PatchlightError)
        assert entry.name in sentence, f"the refusal does not name the metric: {sentence}"
        assert "method" in sentence, f"the refusal does not say what is needed: {sentence}"
    for need in entry.needs:
        kinds = need.split(" or ")
        without = replace(trial, notes={k: note for k, note in trial.notes.items() if k not in kinds})
        sentence = _refusal(lambda without=without: without.run(trial.maps), PatchlightError)  # type: ignore[misc]
        assert entry.name in sentence, f"the refusal does not name the metric: {sentence}"
        assert all(kind in sentence for kind in kinds), f"the refusal does not name {need}: {sentence}"
        for kind in trial.notes.keys() & kinds:
            partial = replace(trial, notes={**trial.notes, kind: _first_missing(trial.notes[kind])})
            evaluation, warned = partial.run(trial.maps)
            _check_values(trial, evaluation, warned, required=False)
            assert bool(evaluation.values[0].isnan()), f"an image without {kind} has a value"
            _assert_close(evaluation.values[1:], first.values[1:], f"beside an image without {kind} and without")


def _first_missing(note: Any) -> Any:
    """Annotations without those of the first image: no labelled pixel, no boxes, an unknown class."""
    if isinstance(note, Tensor):
        return torch.cat([torch.full_like(note[:1], -1), note[1:]])
    return [None if isinstance(note[0], int) else [], *note[1:]]


def _check_direction(trial: _MetricTrial, better: Tensor | MapFunction, worse: Tensor | MapFunction) -> None:
    good, bad = (trial.run(maps)[0] for maps in (better, worse))
    ahead = good.mean > bad.mean if good.higher_is_better else good.mean < bad.mean
    way = "higher" if good.higher_is_better else "lower"
    assert ahead, f"{way} is better, but the better maps have {good.mean:.4g} and the worse ones {bad.mean:.4g}"


def _check_chance(trial: _MetricTrial, chance: Tensor) -> None:
    """Random maps have the expected values, up to five standard errors of their mean and 0.01."""
    if trial.request.metric.explains:

        def random_map(vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
            noise = torch.rand(vit.grid, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            return noise.to(vit.device, vit.dtype).expand(len(images), -1, -1)

        values = torch.stack([trial.run(random_map, seed=seed)[0].values for seed in range(2)])
    else:
        count = len(trial.images)
        many = trial.only([i for _ in range(DRAWS) for i in range(count)])
        values = many.run(many.random_maps(seed=1))[0].values.view(DRAWS, count)
    error = values.std(0) / len(values) ** 0.5
    assert torch.equal(values.isnan().any(0), chance.isnan()), "the closed form exists for other images"
    far = (values.mean(0) - chance).abs() > 5 * error + 0.01
    assert not bool(far.any()), f"random maps have {values.mean(0).tolist()}, not {chance.tolist()}"


def _check_entry(trial: _MetricTrial) -> None:
    entry = trial.request.metric
    _check_words(entry, entry.cost, entry.settings)
    assert all(resolve_metric(alias).metric is entry for alias in entry.aliases), "an alias names another metric"
    assert "no_such_setting" in _refusal(lambda: resolve_metric(entry.name, {"no_such_setting": 1}), PatchlightError)
    for preset in entry.presets:
        low, high = entry.limits(resolve_metric(entry.name, {"preset": preset}).settings)
        assert low < high, f"preset '{preset}' has bounds [{low}, {high}]"

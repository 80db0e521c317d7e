"""The contract every method keeps on every model: `check_method`. A method is covered by being registered."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.base import Anatomy
from patchlight.attribution import Attribution
from patchlight.engine import explain
from patchlight.errors import DegenerateMap, PatchlightError, Unsupported
from patchlight.methods.base import METHODS
from patchlight.methods.requests import Request, list_methods, refusal, resolve

compared: Callable[[str, float, float], None] | None = None
"""Called with (what, error, limit) by each comparison of `check_method` that holds, where set."""


def check_method(
    name: str, vit: Anatomy, images: Tensor, double: Anatomy | None = None, settings: Mapping[str, Any] | None = None
) -> None:
    """Assert the contract of method `name` on a model with B >= 2 images.

    Shape, type, finiteness, batch = loop, seeds, targets, precision, provenance, and a model left as it was found; or
    a clear refusal where the method does not support the model. `double` is the same model in float64: where it is
    given, batches and targets are compared there, out of reach of rounding.
    """
    entry = resolve(name).method
    given = {**entry.quick, **(settings or {})}
    request = resolve(name, given)
    if refusal(request, vit) is not None:
        _check_refusal(request, vit, images)
        return
    before = _state(vit, images)
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)
        first = _check_result(request, vit, images, given)
        _check_seed(request, vit, images, given, first)
        _check_modes(request, vit, images, given, first)
        steady, batch, whole = vit, images, first
        if double is not None:
            steady, batch = double, images.double()
            whole = _check_precision(request, steady, batch, given, first)
        _check_batch(request, steady, batch, given, whole)
        _check_targets(request, steady, batch, given, whole)
    _check_provenance(request, vit, first)
    assert torch.equal(torch.get_rng_state(), random_state), "the global random state was moved"
    _check_untouched(before, _state(vit, images))


def _run(request: Request, vit: Anatomy, images: Tensor, given: Mapping[str, Any], **options: Any) -> Attribution:
    result = explain(vit, images, request.label, **options, **given)
    assert isinstance(result, Attribution)
    return result


def _close(request: Request, a: Tensor, b: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the map's size for exact methods, in rank for discrete ones."""
    assert a.shape == b.shape, f"{what}: shapes {list(a.shape)} and {list(b.shape)}"
    if request.method.exact:
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


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two maps, ties given their mean rank."""
    from scipy.stats import spearmanr

    return float(spearmanr(a.flatten().numpy(), b.flatten().numpy()).statistic)


def _check_refusal(request: Request, vit: Anatomy, images: Tensor) -> None:
    told = _complaint(lambda: explain(vit, images, request.label), Unsupported)
    assert request.method.name in told, f"the refusal does not name the method: {told}"
    assert (refusal(request, vit) or "") in told, f"the refusal gives no reason: {told}"
    row = next(m for m in list_methods(vit) if m.name == request.method.name)
    if request.name != request.method.name:
        return  # a composition may be refused where the method itself works
    assert row.supported is False, f"methods({vit.name}) calls {row.name} supported"
    assert row.reason


def _check_result(request: Request, vit: Anatomy, images: Tensor, given: Mapping[str, Any]) -> Attribution:
    att = _run(request, vit, images, given)
    grid = vit.grid if request.level == "token" else vit.preprocess.size
    assert tuple(att.scores.shape) == (len(images), *grid), f"scores have shape {list(att.scores.shape)}"
    assert att.grid == grid, "att.grid is not the scores' own"
    assert att.level == request.level, "att.level is not what was asked"
    assert att.scores.dtype == torch.float32, f"scores are {att.scores.dtype}"
    assert att.scores.device.type == "cpu", "scores are not on the CPU"
    assert not att.scores.requires_grad, "scores hold on to a graph"
    assert bool(torch.isfinite(att.scores).all()), "scores are not finite"
    assert not request.method.nonnegative or bool((att.scores >= 0).all()), (
        "scores of a non-negative method are negative"
    )
    flat = att.scores.flatten(1)
    assert bool((flat.amax(1) > flat.amin(1)).any()), "every map is constant"
    return att


def _check_batch(request: Request, vit: Anatomy, images: Tensor, given: Mapping[str, Any], whole: Attribution) -> None:
    single = torch.cat([_run(request, vit, images[i : i + 1], given).scores for i in range(len(images))])
    _close(request, whole.scores, single, "a batch and single calls")
    cut = _run(request, vit, images, given, batch_size=1).scores
    _close(request, whole.scores, cut, "one batch and batch_size=1")
    others = [name for name in ("rawatt", "ixg.libra", "random") if refusal(resolve(name), vit) is None]
    together = explain(vit, images, {**{other: {} for other in others}, request.label: given})[request.label].scores
    _close(request, whole.scores, together, "alone and among others")


def _check_seed(request: Request, vit: Anatomy, images: Tensor, given: Mapping[str, Any], first: Attribution) -> None:
    again = _run(request, vit, images, given).scores
    assert torch.equal(first.scores, again), "two equal calls differ"
    other = _run(request, vit, images, given, seed=1).scores
    same = torch.equal(first.scores, other)
    assert same != request.method.stochastic, f"another seed {'does not change' if same else 'changes'} the map"


def _check_targets(
    request: Request, vit: Anatomy, images: Tensor, given: Mapping[str, Any], first: Attribution
) -> None:
    count = len(images)
    assert first.target.shape == (count,), "the explained classes are not recorded"
    explicit = _run(request, vit, images, given, target=first.target.tolist())
    _close(request, first.scores, explicit.scores, "the prediction, by default and by name")
    other = (first.target + 1) % max(vit.classes, 2)
    changed = _run(request, vit, images, given, target=other)
    moved = not torch.equal(first.scores, changed.scores)
    mirrored = vit.classes == 1 and request.method.unsigned  # y and -y have gradients of one size
    told = f"another class {'changes' if moved else 'does not change'} the map"
    assert mirrored or moved == request.method.class_specific, told
    both = _run(request, vit, images, given, target=torch.stack([first.target, other], 1))
    assert both.scores.shape[:2] == (count, 2), f"two classes give shape {list(both.scores.shape)}"
    _close(request, first.scores, both.scores[:, 0], "the first of two classes and alone")
    _close(request, changed.scores, both.scores[:, 1], "the second of two classes and alone")
    pair = _run(request, vit, images, given, target=(0, 1))
    assert bool(torch.isfinite(pair.scores).all()), "a pair of classes gives no finite map"


def _check_modes(request: Request, vit: Anatomy, images: Tensor, given: Mapping[str, Any], first: Attribution) -> None:
    with torch.no_grad():
        inside = _run(request, vit, images, given).scores
    _close(request, first.scores, inside, "inside no_grad and outside")
    with torch.inference_mode():
        inside = _run(request, vit, images, given).scores
    _close(request, first.scores, inside, "inside inference_mode and outside")


def _check_precision(
    request: Request, double: Anatomy, images: Tensor, given: Mapping[str, Any], first: Attribution
) -> Attribution:
    exact = _run(request, double, images, given)
    assert torch.equal(exact.target, first.target), "float64 predicts another class"
    _close(request, exact.scores, first.scores, "float32 and float64", tolerance=2e-3)
    return exact


def _check_provenance(request: Request, vit: Anatomy, first: Attribution) -> None:
    assert first.method == request.name
    assert first.model == vit.name
    assert {"patchlight", "torch"} <= first.versions.keys()
    with tempfile.TemporaryDirectory() as folder:
        back = Attribution.load(first.save(Path(folder) / "out"))
    assert torch.equal(back.scores, first.scores)
    assert torch.equal(back.target, first.target)
    assert (back.method, back.model, back.level, back.seed) == (first.method, first.model, first.level, first.seed)
    entry = request.method
    assert entry.summary, "no docstring"
    assert entry.paper, "no paper"
    assert entry.cost, "no cost"
    assert all(resolve(alias).method is entry for alias in entry.aliases), "an alias leads elsewhere"
    assert "no_such_setting" in _complaint(lambda: resolve(request.label, {"no_such_setting": 1}), PatchlightError)


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
    """Every registered method, and each wrapper once on a method it fits."""
    wrapped = ["genatt.libra", "ixg.plus", "ixg.skipplus.libra", "rawatt.plus", "genatt.rollout", "gradcam.skipplus"]
    wrapped += ["ixg.conservative", "genatt.attnlrp"]
    return [*METHODS, *wrapped]

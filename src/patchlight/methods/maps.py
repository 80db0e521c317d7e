"""The maps of requests on one batch: one pass for all layer maps of a rule, one call per other method."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, warn
from patchlight.core.registry import filter_settings
from patchlight.core.statistics import constant
from patchlight.core.targets import Score, Targets, top_classes
from patchlight.evidence.ablation import ABLATION
from patchlight.evidence.graphs import captured
from patchlight.evidence.passes import Pass, run_pass, surely_predicted
from patchlight.evidence.precision import lowered
from patchlight.evidence.record import BACKWARD
from patchlight.evidence.rules import PLAIN, Rule
from patchlight.evidence.runner import FEATURES, PIXELS, LayerJob
from patchlight.methods.base import Ablates, Ask, Estimate, LayerMap, LayerMaps, OwnPasses, Reads, ReadsBlocks
from patchlight.methods.requests import Request


def compute(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int
) -> tuple[Targets, list[Tensor]]:
    """The maps [B,T,h,w] of every request on one batch, and the explained classes."""
    targets, found = estimate(vit, batch, requests, targets, seed)
    return targets, [one.maps for one in found]


def estimate(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int, first: int = 0
) -> tuple[Targets, list[Estimate]]:
    """The maps [B,T,h,w] of every request, each in its own precision, on one batch (starting at image `first`).

    White-box requests are grouped by course, backward rule, score and precision; each group is one forward and one
    backward per class. Requests without a gradient join the first group of their precision.
    """
    given, found = targets, dict[int, Estimate]()
    requests = [request.suited(vit) for request in requests]
    for group in _groups(requests):
        members = [requests[i] for i in group]
        run = _run_captured if _capturable(members, vit) else _run_shared_pass
        targets, maps = run(vit, batch, targets, members)
        found.update(zip(group, map(Estimate, maps), strict=True))
    if targets is None:
        targets = top_classes(vit.logits(batch), vit.outputs)
    ask = Ask(vit, batch, targets, "logit", seed, PLAIN, together=_shared_reads(requests, vit))
    by_class: ByClass = {}
    for i, request in enumerate(requests):
        if i not in found:
            found[i] = _answer(request, ask, by_class)
        found[i] = replace(found[i], maps=found[i].maps.detach(), precision=request.precision)
    estimates = [found[i] for i in range(len(requests))]
    if _overflows(requests, estimates):
        vit.overflows = True  # float16 is not tried again, and the maps record it
        return estimate(vit, batch, requests, given, seed, first)
    for request, dead in zip(requests, in_stacks([one.maps for one in estimates], _constant), strict=True):
        _warn_if_degenerate(request, vit, dead, first)
    return targets, estimates


def in_stacks(maps: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply a function to stacks of maps [n,B,T,h,w] of one shape; returns its result per map, on the CPU."""
    alike: dict[Any, list[int]] = {}
    for i, scores in enumerate(maps):
        alike.setdefault((scores.shape, scores.dtype), []).append(i)
    there: dict[int, Tensor] = {}
    for some in alike.values():
        stack = torch.stack([maps[i] for i in some]) if len(some) > 1 else maps[some[0]][None]
        there.update(zip(some, function(stack).cpu(), strict=True))
    return [there[i] for i in range(len(maps))]


def _run_shared_pass(
    vit: Anatomy, batch: Tensor, targets: Targets | None, requests: Sequence[Request]
) -> tuple[Targets, list[Tensor]]:
    """The maps [B,T,h,w] of requests that share a pass, and the explained classes."""
    rule, score = _rule_and_score(requests)
    jobs = [job(request, vit) for request in requests]
    precision, course = requests[0].precision, requests[0].course
    seen = run_pass(vit, batch, targets, score, rule, jobs, precision=precision, course=course)
    maps = [_finish(request, vit, seen, j) for j, request in enumerate(requests)]
    return seen.targets if targets is None else targets, maps


def _run_captured(
    vit: Anatomy, batch: Tensor, targets: Targets | None, requests: Sequence[Request]
) -> tuple[Targets, list[Tensor]]:
    """The same from CUDA graphs: one for the forward, if the class is not known yet, and one for the pass.

    A computation that waits for the host cannot be captured and runs normally.
    """
    precision = requests[0].precision
    for one in (vit.wide(), lowered(vit.wide(), precision, products=True)):
        one.renew()  # a graph reads the weights in place and does not follow the model

    def forward(images: Tensor) -> list[Tensor]:
        anything = torch.zeros(len(images), 1, dtype=torch.long, device=images.device)
        return [run_pass(vit, images, Targets(anything), precision=precision).logits]

    if targets is None:
        logits = captured(vit.net, precision, forward, [batch])
        if logits is None:
            return _run_shared_pass(vit, batch, targets, requests)
        targets = surely_predicted(vit, batch, logits[0], precision)
    several, classes = targets.several, [t for t in (targets.index, targets.against) if t is not None]

    def whole(images: Tensor, index: Tensor, against: Tensor | None = None) -> list[Tensor]:
        return _run_shared_pass(vit, images, Targets(index, against, several), requests)[1]

    key = (precision, several, *map(_identity, requests))
    found = captured(vit.net, key, whole, [batch, *(t.to(batch.device) for t in classes)])
    return (targets, found) if found is not None else _run_shared_pass(vit, batch, targets, requests)


def _capturable(requests: Sequence[Request], vit: Anatomy) -> bool:
    """Whether a pass may be captured; a callable score may change from call to call."""
    return vit.device.type == "cuda" and all(r.settings["compile"] and not callable(r.score) for r in requests)


def _identity(request: Request) -> Hashable:
    """The key of a request's graph: plain settings by value, others by identity."""
    method, settings = request.method, request.settings
    depends = repr(method.depends(settings)) if method.depends is not None else ""
    values = ((key, v if isinstance(v, Hashable) else repr(v)) for key, v in sorted(settings.items()))
    return request.name, method.function, request.score, depends, *values


def _overflows(requests: Sequence[Request], found: Sequence[Estimate]) -> bool:
    """Whether a map whose precision was "auto" overflowed in float16."""
    pairs = zip(requests, found, strict=True)
    auto = [e.maps.flatten() for r, e in pairs if r.precision == "fp16" and r.settings.get("precision") == "auto"]
    return bool(auto) and not bool(torch.cat(auto).isfinite().all())


def _groups(requests: Sequence[Request]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    in_pass = [
        (i, request, (request.precision, request.settings["compile"], request.course))
        for i, request in enumerate(requests)
        if request.in_pass
    ]
    for i, request, alike in in_pass:
        if request.backward:
            groups.setdefault((*alike, request.rule.name, request.score), []).append(i)
    for i, request, alike in in_pass:
        if not request.backward:
            same = next((key for key in groups if key[:3] == alike), alike)
            groups.setdefault(same, []).append(i)
    return list(groups.values())


def _rule_and_score(requests: Sequence[Request]) -> tuple[Rule, Score]:
    return next(((request.rule, request.score) for request in requests if request.backward), (PLAIN, "logit"))


def job(request: Request, vit: Anatomy) -> LayerJob:
    """The job of a layer map in a pass."""
    function, own = request.method.function, filter_settings(request.method.function, request.settings)
    layers = (PIXELS,) if request.level == "pixel" else _blocks(request, vit)
    return LayerJob(lambda e: function(e, **own), request.needs, layers, request.method.name)


def _blocks(request: Request, vit: Anatomy) -> tuple[int, ...]:
    if vit.hierarchical and isinstance(request.method, ReadsBlocks) and request.method.features:
        return (FEATURES,)
    return request.composition.blocks(vit, request.settings) if request.composition is not None else ()


def finish(request: Request, vit: Anatomy, seen: Pass, of: int = 0, target: int = 0) -> Tensor:
    """The map [B,h,w] of the explained class of number `target`, from the layer maps of job `of`."""
    values = seen.layers(of, target)
    if request.level == "pixel":
        image: Tensor = values[PIXELS]
        return image
    assert request.composition is not None
    combine = request.composition.function
    maps = LayerMaps(values, vit, partial(seen.rows, vit, target), seen.end(target), _tail(request))
    result = combine(maps, **filter_settings(combine, request.settings))
    adds_end = isinstance(request.method, LayerMap) and request.method.adds_end
    end = maps.end_bias() if adds_end and request.settings.get("include_bias", True) else None
    result = result if end is None else result + end
    return vit.patches(result)


def _tail(request: Request) -> Callable[[LayerMaps, int], Tensor] | None:
    """The method's map restricted to the blocks from one on."""
    own = request.method.composition
    if own is None or "start" not in own.settings:
        return None
    given = filter_settings(own.function, request.settings)
    # a tail is not a sum of tails
    settings = {key: value for key, value in given.items() if key not in ("start", "terms")}
    return lambda maps, start: own.function(maps, start=start, **settings)


def _finish(request: Request, vit: Anatomy, seen: Pass, j: int) -> Tensor:
    if not request.backward and not vit.rows_differ:
        found = finish(request, vit, seen, j)
        return found[:, None].expand(-1, seen.targets.count, *found.shape[1:])
    return torch.stack([finish(request, vit, seen, j, t) for t in range(seen.targets.count)], 1)


ByClass = dict[int, dict[Hashable, Any]]
"""Caches of methods that explain one class, by the number of the explained class."""


def _shared_reads(requests: Sequence[Request], vit: Anatomy) -> Reads:
    """What ablating methods read of the images' forward, if several share it.

    Methods that do not read the last block are left out: their forward takes a shortcut there and rounds differently.
    """
    methods = [(r.method, r.settings) for r in requests]
    each = [m.reads(own, vit) for m, own in methods if isinstance(m, Ablates) and m.reads is not None]
    each = [reads for reads in each if any(layer == vit.depth - 1 for _, layer in reads)]
    return Reads().union(*each) if len(each) > 1 else Reads()


def _answer(request: Request, ask: Ask, by_class: ByClass) -> Estimate:
    """The maps [B,T,h,w] of a method that takes an Ask."""
    method = request.method
    ask = replace(ask, score=request.score, rule=request.rule)
    if isinstance(method, Ablates):
        return _call(request, replace(ask, ablation_settings={key: request.settings[key] for key in ABLATION}))
    vit = ask.vit.wide()
    ask = replace(
        ask,
        vit=vit,
        images=ask.images.to(vit.dtype),
        layers=_blocks(request, vit),
        precision=request.precision,
        shared={},
    )
    if isinstance(method, OwnPasses) and method.every_class:
        return _call(request, ask)

    def of(t: int) -> Estimate:
        return _call(request, replace(ask, targets=ask.targets.column(t), shared=by_class.setdefault(t, {})))

    if method.ignores_class and not vit.rows_differ:
        return Estimate.stacked([of(0)] * ask.targets.count)
    return Estimate.stacked([of(t) for t in range(ask.targets.count)])


def _call(request: Request, ask: Ask) -> Estimate:
    function = request.method.function
    result: Tensor | Pass | Estimate = function(ask, **filter_settings(function, request.settings))
    if isinstance(result, Estimate):
        return result
    return Estimate(finish(request, ask.vit, result) if isinstance(result, Pass) else result)


def _constant(maps: Tensor) -> Tensor:
    """Which images [...,B] have a constant map among theirs [...,B,T,h,w]; a single patch does not count."""
    return constant(maps.flatten(3)).any(-1) & (maps[0, 0, 0].numel() > 1)


def _warn_if_degenerate(request: Request, vit: Anatomy, dead: Tensor, first: int) -> None:
    """Warn about maps that are known to be degenerate, or that are constant: `dead` [B]."""
    advice = request.method.advice
    reason = advice({**request.settings, "rule": request.rule.name}, vit) if advice is not None else None
    if reason is None and bool(dead.any()):
        images = (first + dead.nonzero().flatten()).tolist()
        reason = f"the map of image {', '.join(map(str, images[:8]))} is constant"
        reason += f": {request.method.constant}" if request.method.constant else ""
    needed = request.method.needed(request.settings)
    if reason is None and vit.sinks and "A" in needed and not needed & BACKWARD:
        reason = vit.sinks
    if reason is not None:
        warn(f"{request.name}: {reason}", DegenerateMap)

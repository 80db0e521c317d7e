"""Computes the maps of requests on a batch: one pass for all layer maps of a rule, one call for any other method."""

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
from patchlight.core.targets import Targets, top_classes
from patchlight.evidence.ablation import ABLATION
from patchlight.evidence.graphs import captured
from patchlight.evidence.passes import Pass, run_pass, surely_predicted
from patchlight.evidence.precision import lowered
from patchlight.evidence.rules import PLAIN
from patchlight.evidence.runner import FEATURES, PIXELS, LayerJob
from patchlight.methods.base import Ablates, Ask, Estimate, LayerMap, LayerMaps, OwnPasses, Reads, ReadsBlocks
from patchlight.methods.requests import Request


def compute(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int
) -> tuple[Targets, list[Tensor]]:
    """The explained classes, and the maps [B,T,h,w] of every request on a batch."""
    targets, estimates = estimate(vit, batch, requests, targets, seed)
    return targets, [each.maps for each in estimates]


def estimate(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int, first: int = 0
) -> tuple[Targets, list[Estimate]]:
    """The explained classes, and the maps [B,T,h,w] of every request on a batch that begins at image `first`.

    White-box requests are grouped by course, backward rule, score and precision; each group is one forward and one
    backward per class. Requests without a gradient join the first group of their precision.
    """
    given_targets, by_request = targets, dict[int, Estimate]()
    requests = [request.suited(vit) for request in requests]
    for group in _groups(requests):
        members = [requests[i] for i in group]
        run = _run_captured if _capturable(members, vit) else _run_shared_pass
        targets, maps = run(vit, batch, targets, members)
        by_request.update(zip(group, map(Estimate, maps), strict=True))
    if targets is None:
        targets = top_classes(vit.logits(batch), vit.outputs)
    ask = Ask(vit, batch, targets, "logit", seed, PLAIN, together=_shared_reads(requests, vit))
    by_class: ByClass = {}
    estimates: list[Estimate] = []
    for i, request in enumerate(requests):
        result = by_request[i] if i in by_request else _answer(request, ask, by_class)
        estimates.append(replace(result, maps=result.maps.detach(), precision=request.precision))
    if _overflows(requests, estimates):
        vit.overflows = True  # float16 is not tried again, and the maps record it
        return estimate(vit, batch, requests, given_targets, seed, first)
    for request, constant_maps in zip(requests, in_stacks([e.maps for e in estimates], _constant), strict=True):
        _warn_if_degenerate(request, vit, constant_maps, first)
    return targets, estimates


def in_stacks(maps: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply a function to stacks of maps [n,B,T,h,w] of one shape; returns its result for each map, on the CPU."""
    groups: dict[Any, list[int]] = {}
    for i, scores in enumerate(maps):
        groups.setdefault((scores.shape, scores.dtype), []).append(i)
    results: dict[int, Tensor] = {}
    for group in groups.values():
        stack = torch.stack([maps[i] for i in group]) if len(group) > 1 else maps[group[0]][None]
        results.update(zip(group, function(stack).cpu(), strict=True))
    return [results[i] for i in range(len(maps))]


def _run_shared_pass(
    vit: Anatomy, batch: Tensor, targets: Targets | None, requests: Sequence[Request]
) -> tuple[Targets, list[Tensor]]:
    """The explained classes, and the maps [B,T,h,w] of requests that share a pass."""
    pairs = ((request.rule, request.score) for request in requests if request.backward)
    rule, score = next(pairs, (PLAIN, "logit"))
    jobs = [job(request, vit) for request in requests]
    precision, course = requests[0].precision, requests[0].course
    result = run_pass(vit, batch, targets, score, rule, jobs, precision=precision, course=course)
    maps = [_maps_of_classes(request, vit, result, j) for j, request in enumerate(requests)]
    return result.targets if targets is None else targets, maps


def _run_captured(
    vit: Anatomy, batch: Tensor, targets: Targets | None, requests: Sequence[Request]
) -> tuple[Targets, list[Tensor]]:
    """`_run_shared_pass` from CUDA graphs: one for the prediction, if there is no target, and one for the pass.

    A computation that waits for the host cannot be captured and runs normally.
    """
    precision = requests[0].precision
    for model in (vit.wide(), lowered(vit.wide(), precision, products=True)):
        model.renew()  # a graph reads the weights in place and does not follow the model

    def forward(images: Tensor) -> list[Tensor]:
        class_0 = torch.zeros(len(images), 1, dtype=torch.long, device=images.device)
        return [run_pass(vit, images, Targets(class_0), precision=precision).logits]

    if targets is None:
        logits = captured(vit.net, precision, forward, [batch])
        if logits is None:
            return _run_shared_pass(vit, batch, targets, requests)
        targets = surely_predicted(vit, batch, logits[0], precision)
    several, classes = targets.several, [t for t in (targets.index, targets.against) if t is not None]

    def shared_pass(images: Tensor, index: Tensor, against: Tensor | None = None) -> list[Tensor]:
        return _run_shared_pass(vit, images, Targets(index, against, several), requests)[1]

    key = (precision, several, *map(_identity, requests))
    maps = captured(vit.net, key, shared_pass, [batch, *(t.to(batch.device) for t in classes)])
    return (targets, maps) if maps is not None else _run_shared_pass(vit, batch, targets, requests)


def _capturable(requests: Sequence[Request], vit: Anatomy) -> bool:
    """Whether a pass may be captured; a callable score may change from call to call."""
    return vit.device.type == "cuda" and all(r.settings["compile"] and not callable(r.score) for r in requests)


def _identity(request: Request) -> Hashable:
    """The key of a request's graph: its settings by value if they are hashable, otherwise as text."""
    method, settings = request.method, request.settings
    depends = repr(method.depends(settings)) if method.depends is not None else ""
    values = ((key, v if isinstance(v, Hashable) else repr(v)) for key, v in sorted(settings.items()))
    return request.name, method.function, request.score, depends, *values


def _overflows(requests: Sequence[Request], estimates: Sequence[Estimate]) -> bool:
    """Whether a map whose precision was "auto" overflowed in float16."""
    pairs = zip(requests, estimates, strict=True)
    auto = [e.maps.flatten() for r, e in pairs if r.precision == "fp16" and r.settings.get("precision") == "auto"]
    return bool(auto) and not bool(torch.cat(auto).isfinite().all())


def _groups(requests: Sequence[Request]) -> list[list[int]]:
    """The indices of requests that share a pass."""
    groups: dict[Any, list[int]] = {}
    in_pass = [
        (i, request, (request.precision, request.settings["compile"], request.course))
        for i, request in enumerate(requests)
        if request.in_pass
    ]
    for i, request, key in in_pass:
        if request.backward:
            groups.setdefault((*key, request.rule.name, request.score), []).append(i)
    for i, request, key in in_pass:
        if not request.backward:
            groups.setdefault(next((other for other in groups if other[:3] == key), key), []).append(i)
    return list(groups.values())


def job(request: Request, vit: Anatomy) -> LayerJob:
    """The job of a layer map in a pass."""
    function, settings = request.method.function, filter_settings(request.method.function, request.settings)
    layers = (PIXELS,) if request.level == "pixel" else _blocks(request, vit)
    return LayerJob(lambda e: function(e, **settings), request.needs, layers, request.method.name)


def _blocks(request: Request, vit: Anatomy) -> tuple[int, ...]:
    if vit.hierarchical and isinstance(request.method, ReadsBlocks) and request.method.features:
        return (FEATURES,)
    return request.composition.blocks(vit, request.settings) if request.composition is not None else ()


def finish(request: Request, vit: Anatomy, result: Pass, job: int = 0, target: int = 0) -> Tensor:
    """Combine the layer maps of a job to the map [B,h,w] of the class number `target`."""
    values = result.layers(job, target)
    if request.level == "pixel":
        image: Tensor = values[PIXELS]
        return image
    assert request.composition is not None
    combine = request.composition.function
    maps = LayerMaps(values, vit, partial(result.rows, vit, target), result.end(target), _tail(request))
    scores = combine(maps, **filter_settings(combine, request.settings))
    adds_end = isinstance(request.method, LayerMap) and request.method.adds_end
    end = maps.end_bias() if adds_end and request.settings.get("include_bias", True) else None
    return vit.patches(scores if end is None else scores + end)


def _tail(request: Request) -> Callable[[LayerMaps, int], Tensor] | None:
    """The function that computes the method's map restricted to the blocks from a given one on, if it has a start."""
    composition = request.method.composition
    if composition is None or "start" not in composition.settings:
        return None
    settings = filter_settings(composition.function, request.settings)
    # a tail is not a sum of tails
    settings = {key: value for key, value in settings.items() if key not in ("start", "terms")}
    return lambda maps, start: composition.function(maps, start=start, **settings)


def _maps_of_classes(request: Request, vit: Anatomy, result: Pass, job: int) -> Tensor:
    """The maps [B,T,h,w] of one request of a pass."""
    if not request.backward and not vit.rows_differ:
        maps = finish(request, vit, result, job)
        return maps[:, None].expand(-1, result.targets.count, *maps.shape[1:])
    return torch.stack([finish(request, vit, result, job, t) for t in range(result.targets.count)], 1)


ByClass = dict[int, dict[Hashable, Any]]
"""Caches of methods that explain one class, by the number of the explained class."""


def _shared_reads(requests: Sequence[Request], vit: Anatomy) -> Reads:
    """The evidence that ablating methods read from the forward over the images, if several share it.

    Methods that do not read the last block are left out: their forward takes a shortcut there and rounds differently.
    """
    methods = [(r.method, r.settings) for r in requests]
    reads = [m.reads(settings, vit) for m, settings in methods if isinstance(m, Ablates) and m.reads is not None]
    reads = [parts for parts in reads if any(layer == vit.depth - 1 for _, layer in parts)]
    return Reads().union(*reads) if len(reads) > 1 else Reads()


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

    def estimate_class(t: int) -> Estimate:
        return _call(request, replace(ask, targets=ask.targets.column(t), shared=by_class.setdefault(t, {})))

    if method.ignores_class and not vit.rows_differ:
        return Estimate.stack([estimate_class(0)] * ask.targets.count)
    return Estimate.stack([estimate_class(t) for t in range(ask.targets.count)])


def _call(request: Request, ask: Ask) -> Estimate:
    function = request.method.function
    result: Tensor | Pass | Estimate = function(ask, **filter_settings(function, request.settings))
    if isinstance(result, Estimate):
        return result
    return Estimate(finish(request, ask.vit, result) if isinstance(result, Pass) else result)


def _constant(maps: Tensor) -> Tensor:
    """A mask [...,B] of the images with a constant map [...,B,T,h,w]; a map of a single patch is not constant."""
    return constant(maps.flatten(3)).any(-1) & (maps[0, 0, 0].numel() > 1)


def _warn_if_degenerate(request: Request, vit: Anatomy, constant_maps: Tensor, first: int) -> None:
    """Warn of maps that are degenerate with these settings, or constant (a mask [B])."""
    advice = request.method.advice
    reason = advice({**request.settings, "rule": request.rule.name}, vit) if advice is not None else None
    if reason is None and bool(constant_maps.any()):
        images = (first + constant_maps.nonzero().flatten()).tolist()
        reason = f"the map of image {', '.join(map(str, images[:8]))} is constant"
        reason += f": {request.method.constant}" if request.method.constant else ""
    if reason is None and vit.sinks and "A" in request.needs and not request.backward:
        reason = vit.sinks
    if reason is not None:
        warn(f"{request.name}: {reason}", DegenerateMap)

"""`explain`: from images and method names to attributions, all white-box methods of a rule in one pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy, undisturbed
from patchlight.anatomy.load import wrap
from patchlight.core.attribution import Attribution, Attributions, versions
from patchlight.core.errors import DegenerateMap, NotFinite, PatchlightError, integer, warn
from patchlight.core.fingerprints import identity, of_images
from patchlight.core.images import in_batches
from patchlight.core.photos import Photos
from patchlight.core.progress import Progress, telling
from patchlight.core.registry import Asked, accepted, resolve_all
from patchlight.core.statistics import constant
from patchlight.core.targets import Score, Target, Targets, predicted, resolve_targets, score_of
from patchlight.evidence.ablation import ABLATION
from patchlight.evidence.graphs import captured, forget
from patchlight.evidence.passes import FEATURES, PIXELS, LayerJob, Pass, fitting, run_pass, surely_predicted
from patchlight.evidence.precision import HALF, Decided, lowered
from patchlight.evidence.rules import PLAIN, Rule
from patchlight.methods.base import Ablates, Ask, Estimate, LayerMap, LayerMaps, OwnPasses, ReadsBlocks
from patchlight.methods.requests import Request, check_supported, resolve


@overload
def explain(
    vit: Anatomy | nn.Module, images: Any, method: str = ..., target: Target = ..., **options: Any
) -> Attribution: ...
@overload
def explain(
    vit: Anatomy | nn.Module,
    images: Any,
    method: Sequence[str] | Mapping[str, Mapping[str, Any] | str] | Sequence[Request],
    target: Target = ...,
    **options: Any,
) -> Attributions: ...
@undisturbed
def explain(
    vit: Anatomy | nn.Module,
    images: Any,
    method: Asked | Sequence[Request] = "genatt",
    target: Target = None,
    *,
    score: Score | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | bool = True,
    finite: bool = True,
    **settings: Any,
) -> Attribution | Attributions:
    """Explain a model's decision about images: which patches speak for the target class.

    `images`: a preprocessed [B,C,H,W] tensor, PIL image(s) or path(s); or a generator or DataLoader of these, which is
    read as it comes (of a tuple such as (images, labels), the first part). `method`: a name, a list of names, or a dict
    of names and settings (a setting `method`, or a bare name, makes the key a label); the latter two give a dict by the
    names asked, from one forward and one backward per backward rule. `target`: None (the prediction), a class index or
    label name, a list of one per image, several per image (a list of lists or [B,T]), or a tuple (a, b) for a against
    b, whatever the number of images. `score`: "logit", "probability" or a callable of the logits. `progress`: a bar
    where it takes over two seconds and somebody watches (a terminal or notebook), False for none, or a callable of the
    images done and their number (None where that is not known). A map that is not finite is refused, unless `finite` is
    False. Further keywords are the method's settings.

    >>> att = pl.explain(vit, "cat.jpg", method="genatt", target="tabby")      # doctest: +SKIP
    """
    vit = wrap(vit)
    seed = integer("seed", seed, 0)
    size = None if batch_size is None else integer("batch_size", batch_size, 1)
    resolved = resolve_all(method, settings, Request, "method", lambda label, own: resolve(label, own, score, _OPTIONS))
    asked = [request.suited(vit) for request in resolved]
    with vit.settled():
        results = _explained(vit, images, asked, target, seed, size, progress, finite)
    return results[method] if isinstance(method, str) else results


def _explained(
    vit: Anatomy,
    images: Any,
    asked: Sequence[Request],
    target: Target,
    seed: int,
    size: int | None,
    progress: Progress | bool,
    finite: bool,
) -> Attributions:
    for request in asked:
        check_supported(request, vit)
    size = default_batch_size(vit, asked) if size is None else size
    photos = Photos(vit.preprocess)
    count, batches = in_batches(images, size, vit.preprocess, vit.channels, photos.add)
    targets = resolve_targets(target, count, vit.outcomes, vit.labels)
    chunks: list[list[Estimate]] = [[] for _ in asked]
    chosen: list[Targets] = []
    precisions: list[dict[str, None]] = [{} for _ in asked]
    hashes: list[str] = []
    begin = 0
    with telling(progress, "explaining") as tell:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            wanted = None if targets is None else targets.part(begin, len(batch), count)
            used, found, size = _within_memory(vit, batch, asked, wanted, seed, begin, size)
            maps = [one.maps for one in found]
            chosen.append(used)
            for request, had in zip(asked, precisions, strict=True):
                had[request.precision(vit)] = None
            of_batch = of_images(batch)
            _warn_of_references(vit, of_batch, used, begin)
            hashes.extend(of_batch)
            photos.see(batch)
            for kept, one, scores in zip(chunks, found, _in_stacks(maps, lambda stack: stack.float()), strict=True):
                error = None if one.error is None else one.error.detach().float().cpu()
                kept.append(replace(one, maps=scores, error=error))
            broken = _in_stacks(maps, lambda stack: ~stack.isfinite().flatten(2).all(2)) if finite else []
            for request, lost in zip(asked, broken, strict=False):
                _check_finite(request, vit, batch, used, lost, begin)
            begin += len(batch)
            tell(begin, count)
    if not chosen:
        raise PatchlightError("no images were given; give a tensor, PIL image(s) or path(s)")
    of = {"weights": identity(vit), "images": tuple(hashes), "photos": tuple(photos.kept)}
    explained = Targets.joined(chosen)
    results = Attributions()
    for request, kept, had in zip(asked, chunks, precisions, strict=True):
        about = {**of, "precision": "+".join(had)}
        results[request.label] = attribution_of(vit, request, Estimate.joined(kept), explained, seed, about)
    return results


def _within_memory(
    vit: Anatomy,
    batch: Tensor,
    requests: Sequence[Request],
    targets: Targets | None,
    seed: int,
    first: int,
    size: int,
) -> tuple[Targets, list[Estimate], int]:
    """What `estimate` gives for a batch, at most `size` images at once, halved when memory runs out; and that size."""
    parts: list[tuple[Targets, list[Estimate]]] = []
    begin = 0
    while begin < len(batch):
        some = batch[begin : begin + size]
        wanted = None if targets is None else targets[begin : begin + size]
        try:
            parts.append(estimate(vit, some, requests, wanted, seed, first + begin))
            begin += len(some)
        except (torch.OutOfMemoryError, MemoryError):
            if size == 1:
                raise PatchlightError("not even one image fits into memory; ask for fewer methods at once") from None
            size = max(1, min(size, len(some)) // 2)
            forget(vit.net)
    if len(parts) == 1:
        return *parts[0], size
    joined = Targets.joined([used for used, _ in parts])
    return joined, [Estimate.joined(found) for found in zip(*(found for _, found in parts), strict=True)], size


def compute(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int
) -> tuple[Targets, list[Tensor]]:
    """The maps [B,T,h,w] of every request on one batch, and the classes explained."""
    targets, found = estimate(vit, batch, requests, targets, seed)
    return targets, [one.maps for one in found]


def estimate(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int, first: int = 0
) -> tuple[Targets, list[Estimate]]:
    """The maps [B,T,h,w] of every request, each in its own precision, on one batch (from image `first` on).

    White-box requests are grouped by course, backward rule, score and precision; each group is one forward and one
    backward per class. Requests without a gradient join the first group of their precision.
    """
    asked, maps, drawn = targets, dict[int, Tensor](), dict[int, Estimate]()
    requests = [request.suited(vit) for request in requests]
    for group in _groups(requests, vit):
        some = [requests[i] for i in group]
        run = _captured if _capturable(some, vit) else _passed
        targets, found = run(vit, batch, targets, some)
        maps.update(zip(group, found, strict=True))
    if targets is None:
        targets = predicted(vit.logits(batch), vit.outputs)
    shared: Shared = {}
    for i, request in enumerate(requests):
        if i not in maps:
            drawn[i] = ask(request, vit, batch, targets, seed, shared)
            maps[i] = drawn[i].maps
    if _overflows(vit, requests, maps):
        vit.overflows = True  # float16 is not tried again, and the maps say so
        return estimate(vit, batch, requests, asked, seed, first)
    found = [maps[i].detach() for i in range(len(requests))]
    for request, dead in zip(requests, _in_stacks(found, _constant), strict=True):
        _warn_if_degenerate(request, vit, dead, first)
    return targets, [replace(drawn[i], maps=own) if i in drawn else Estimate(own) for i, own in enumerate(found)]


def _in_stacks(maps: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """A function of stacks of maps [n,B,T,h,w], those of one shape at once, as it gives for each map, on the CPU."""
    alike: dict[Any, list[int]] = {}
    for i, scores in enumerate(maps):
        alike.setdefault((scores.shape, scores.dtype), []).append(i)
    there: dict[int, Tensor] = {}
    for some in alike.values():
        stack = torch.stack([maps[i] for i in some]) if len(some) > 1 else maps[some[0]][None]
        there.update(zip(some, function(stack).cpu(), strict=True))
    return [there[i] for i in range(len(maps))]


def _passed(
    vit: Anatomy, batch: Tensor, targets: Targets | None, requests: Sequence[Request]
) -> tuple[Targets, list[Tensor]]:
    """The maps [B,T,h,w] of requests that share a pass, and the classes explained."""
    rule, score = _rule_and_score(requests)
    jobs = [job(request, vit) for request in requests]
    precision, course = requests[0].precision(vit), requests[0].course(vit)
    seen = run_pass(vit, batch, targets, score, rule, jobs, precision=precision, course=course)
    maps = [_finish(request, vit, seen, j) for j, request in enumerate(requests)]
    return seen.targets if targets is None else targets, maps


def _captured(
    vit: Anatomy, batch: Tensor, targets: Targets | None, requests: Sequence[Request]
) -> tuple[Targets, list[Tensor]]:
    """The same from CUDA graphs: one of the forward, where the class is not known yet, and one of the pass.

    What waits for the host on its way cannot be captured, and is computed step by step.
    """
    precision = requests[0].precision(vit)
    for one in (vit.wide(), lowered(vit.wide(), precision, products=True)):
        one.renew()  # a graph reads their weights, and does not follow the model's itself

    def forward(images: Tensor) -> list[Tensor]:
        anything = torch.zeros(len(images), 1, dtype=torch.long, device=images.device)
        return [run_pass(vit, images, Targets(anything), precision=precision).logits]

    if targets is None:
        logits = captured(vit.net, precision, forward, [batch])
        if logits is None:
            return _passed(vit, batch, targets, requests)
        targets = surely_predicted(vit, batch, logits[0], precision)
    several, classes = targets.several, [t for t in (targets.index, targets.against) if t is not None]

    def whole(images: Tensor, index: Tensor, against: Tensor | None = None) -> list[Tensor]:
        return _passed(vit, images, Targets(index, against, several), requests)[1]

    key = (precision, several, *map(_identity, requests))
    found = captured(vit.net, key, whole, [batch, *(t.to(batch.device) for t in classes)])
    return (targets, found) if found is not None else _passed(vit, batch, targets, requests)


def _capturable(requests: Sequence[Request], vit: Anatomy) -> bool:
    """Whether a pass may be captured: what a callable makes of the logits may change from call to call."""
    asked = all(r.settings["compile"] and not callable(r.score) for r in requests)
    return asked and vit.device.type == "cuda"


def _identity(request: Request) -> Hashable:
    """What a graph of this request depends on. Plain settings are told apart by what they are, others by themselves."""
    method, settings = request.method, request.settings
    depends = repr(method.depends(settings)) if method.depends is not None else ""
    values = ((key, v if isinstance(v, Hashable) else repr(v)) for key, v in sorted(settings.items()))
    return request.name, method.function, request.score, depends, *values


def _overflows(vit: Anatomy, requests: Sequence[Request], maps: Mapping[int, Tensor]) -> bool:
    """Whether a map that was left to "auto" has lost its numbers in float16."""
    auto = [i for i, r in enumerate(requests) if r.settings.get("precision") == "auto" and r.precision(vit) == "fp16"]
    return bool(auto) and not bool(torch.cat([maps[i].flatten() for i in auto]).isfinite().all())


def _groups(requests: Sequence[Request], vit: Anatomy) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    asked = [(i, request, request.precision(vit)) for i, request in enumerate(requests) if request.in_pass]
    for i, request, precision in asked:
        if request.backward:
            course = request.course(vit)
            key = (precision, request.settings["compile"], course, request.rule.name, request.score)
            groups.setdefault(key, []).append(i)
    for i, request, precision in asked:
        if not request.backward:
            alike = (precision, request.settings["compile"], request.course(vit))
            same = next((key for key in groups if key[:3] == alike), alike)
            groups.setdefault(same, []).append(i)
    return list(groups.values())


def _rule_and_score(requests: Sequence[Request]) -> tuple[Rule, Score]:
    for request in requests:
        if request.backward:
            return request.rule, request.score
    return PLAIN, "logit"


def job(request: Request, vit: Anatomy) -> LayerJob:
    """What a pass has to compute for a layer map."""
    function, own = request.method.function, accepted(request.method.function, request.settings)
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
    maps = LayerMaps(values, vit, seen.row(vit, target), seen.end(target), _tail(request))
    result = combine(maps, **accepted(combine, request.settings))
    adds_end = isinstance(request.method, LayerMap) and request.method.adds_end
    end = maps.end_bias() if adds_end and request.settings.get("include_bias", True) else None
    result = result if end is None else result + end
    return vit.patches(result)


def _tail(request: Request) -> Callable[[LayerMaps, int], Tensor] | None:
    """The method's own map restricted to the blocks from one on."""
    own = request.method.composition
    if own is None or "start" not in own.settings:
        return None
    given = accepted(own.function, request.settings)
    # a tail is no sum of tails
    settings = {key: value for key, value in given.items() if key not in ("start", "terms")}
    return lambda maps, start: own.function(maps, start=start, **settings)


def _finish(request: Request, vit: Anatomy, seen: Pass, j: int) -> Tensor:
    if not request.backward and not vit.rows_differ:
        return finish(request, vit, seen, j)[:, None].expand(-1, seen.targets.count, -1, -1)
    return torch.stack([finish(request, vit, seen, j, t) for t in range(seen.targets.count)], 1)


Shared = dict[int, dict[Hashable, Tensor]]
"""What the methods of one batch keep for each other, by the number of the explained class."""


def ask(request: Request, vit: Anatomy, images: Tensor, targets: Targets, seed: int, shared: Shared) -> Estimate:
    """The maps [B,T,h,w] of a method that takes an Ask."""
    if isinstance(request.method, Ablates):
        return _asked(request, vit, images, targets, seed, {})
    precision, vit = request.precision(vit), vit.wide()
    images = images.to(vit.dtype)
    if isinstance(request.method, OwnPasses) and request.method.every_class:
        return _asked(request, vit, images, targets, seed, {}, precision)

    def of(t: int) -> Estimate:
        return _asked(request, vit, images, targets.column(t), seed, shared.setdefault(t, {}), precision)

    if not request.method.class_specific and not vit.rows_differ:
        return Estimate.stacked([of(0)] * targets.count)
    return Estimate.stacked([of(t) for t in range(targets.count)])


def _asked(
    request: Request,
    vit: Anatomy,
    images: Tensor,
    targets: Targets,
    seed: int,
    shared: dict[Hashable, Tensor],
    precision: Decided = "full",
) -> Estimate:
    ablation = {key: request.settings[key] for key in ABLATION} if isinstance(request.method, Ablates) else {}
    blocks = _blocks(request, vit)
    given = Ask(vit, images, targets, request.score, seed, request.rule, blocks, ablation, precision, shared)
    function = request.method.function
    result: Tensor | Pass | Estimate = function(given, **accepted(function, request.settings))
    if isinstance(result, Estimate):
        return result
    return Estimate(finish(request, vit, result) if isinstance(result, Pass) else result)


def _constant(maps: Tensor) -> Tensor:
    """Which images [...,B] have a map of one value among theirs [...,B,T,h,w]; one patch alone has no other."""
    return constant(maps.flatten(-2)).any(-1) & (maps.shape[-2:] != (1, 1))


def _warn_if_degenerate(request: Request, vit: Anatomy, dead: Tensor, first: int) -> None:
    """Say what is known about its maps beforehand, or which are constant: `dead` [B]."""
    advice = request.method.advice
    reason = advice({**request.settings, "rule": request.rule.name}, vit) if advice is not None else None
    if reason is None and bool(dead.any()):
        images = (first + dead.nonzero().flatten()).tolist()
        reason = f"the map of image {', '.join(map(str, images[:8]))} is constant"
        reason += f": {request.method.constant}" if request.method.constant else ""
    if reason is not None:
        warn(f"{request.name}: {reason}", DegenerateMap)


def _warn_of_references(vit: Anatomy, hashes: Sequence[str], targets: Targets, first: int) -> None:
    """Say which images are explained by their similarity to themselves."""
    same = [] if vit.head is None else vit.head.itself(hashes, targets.index)
    if same:
        images = ", ".join(str(first + i) for i in same[:8])
        warn(
            f"image {images} is the reference itself, whose similarity is 1 with no gradient, so what its map shows is "
            "rounding; explain another image",
            DegenerateMap,
        )


def _check_finite(request: Request, vit: Anatomy, batch: Tensor, targets: Targets, broken: Tensor, first: int) -> None:
    """Refuse maps with NaN or infinity, `broken` [B]: which image, which method, and where the numbers were lost."""
    if not bool(broken.any()):
        return
    i = int(broken.nonzero()[0])
    logits = vit.logits(batch)
    if not bool(logits[i].isfinite().all()):
        reason = "the model's logits are not finite there"
    elif not bool(score_of(logits, targets, request.score, vit.outputs)[i].isfinite().all()):
        reason = "the score made of the model's logits is not finite there"
    else:
        half = HALF.get(request.precision(vit))
        reason = f"its numbers overflow {str(half or vit.dtype).removeprefix('torch.')}"
        reason += "; precision='tf32' or 'full' may hold them" if half is not None else ""
    reason += "; try the model in float32" if vit.dtype in (torch.float16, torch.bfloat16) else ""
    raise NotFinite(f"the map of image {first + i} by {request.name} is not finite: {reason}")


_OPTIONS = ("target", "score", "seed", "batch_size", "progress", "finite")


def default_batch_size(vit: Anatomy, requests: Sequence[Request] = ()) -> int:
    """How many images at once: 1 to 32, such that attention and its gradient, all heads and blocks, have about 1.5 GB.

    Of methods that all run passes on CUDA, what memory has room for (`fitting`), as a power of two: a size that changes
    with every byte that is free would round differently each time.
    """
    if vit.device.type != "cuda" or not requests or any(isinstance(r.method, Ablates) for r in requests):
        return max(1, min(32, int(1.5e9 / (2 * 4 * max(vit.depth, 1) * vit.heads * vit.tokens**2))))
    wide = [r for r in requests if r.precision(vit) not in HALF]
    return 1 << fitting(vit, not wide, any(r.needs & {"A", "G"} for r in wide)).bit_length() - 1


def attribution_of(
    vit: Anatomy, request: Request, found: Estimate, targets: Targets, seed: int, of: dict[str, Any]
) -> Attribution:
    """The result of a request: maps [B,T,h,w] with their provenance; `of` are weights, images and photos."""
    several, scores, error = targets.several, found.maps, found.error
    return Attribution(
        scores=scores if several else scores[:, 0],
        error=error if several or error is None else error[:, 0],
        samples=() if found.samples is None else tuple(found.samples.tolist()),
        facts={name: tuple(values.tolist()) for name, values in found.facts.items()},
        target=targets.index if several else targets.index[:, 0],
        against=None if targets.against is None else targets.against[:, 0],
        method=request.name,
        settings={k: v for k, v in request.settings.items() if k != "level"},
        level=request.level,
        score=request.score if isinstance(request.score, str) else getattr(request.score, "__name__", "callable"),
        model=vit.name,
        image_size=vit.preprocess.size,
        labels=tuple(vit.label(int(i)) for i in targets.index.flatten()),
        against_labels=() if targets.against is None else tuple(vit.label(int(i)) for i in targets.against[:, 0]),
        head={} if vit.head is None else vit.head.about(),
        seed=seed,
        versions=versions(),
        preprocess=vit.preprocess,
        extent=vit.extent if request.level == "token" and tuple(vit.extent) != tuple(vit.preprocess.size) else None,
        **{"precision": request.precision(vit), **of},
    )

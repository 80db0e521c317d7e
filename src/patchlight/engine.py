"""`explain`: from images and method names to attributions, all white-box methods of a rule in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy, undisturbed
from patchlight.anatomy.load import wrap
from patchlight.attribution import Attribution, Attributions, versions
from patchlight.errors import DegenerateMap, NotFinite, PatchlightError, integer, warn
from patchlight.evidence.ablation import ABLATION
from patchlight.evidence.passes import PIXELS, LayerJob, Pass, run_pass
from patchlight.evidence.rules import PLAIN, Rule
from patchlight.fingerprints import fingerprint, of_images
from patchlight.images import in_batches
from patchlight.methods.base import Ablates, Ask, LayerMap, LayerMaps
from patchlight.methods.requests import Request, check_supported, resolve
from patchlight.photos import Photos
from patchlight.progress import Progress, telling
from patchlight.registry import Asked, accepted, resolve_all
from patchlight.statistics import constant
from patchlight.targets import Score, Target, Targets, predicted, resolve_targets, score_of


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
    vit.renew()
    seed = integer("seed", seed, 0)
    size = default_batch_size(vit) if batch_size is None else integer("batch_size", batch_size, 1)
    asked = resolve_all(method, settings, Request, "method", lambda label, own: resolve(label, own, score, _OPTIONS))
    for request in asked:
        check_supported(request, vit)
    photos = Photos(vit.preprocess)
    count, batches = in_batches(images, size, vit.preprocess, vit.channels, photos.add)
    targets = resolve_targets(target, count, vit.classes, vit.labels)
    chunks: list[list[Tensor]] = [[] for _ in asked]
    chosen: list[Targets] = []
    hashes: list[str] = []
    begin = 0
    with telling(progress, "explaining") as tell:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            wanted = None if targets is None else targets.part(begin, len(batch), count)
            used, maps = compute(vit, batch, asked, wanted, seed, begin)
            chosen.append(used)
            hashes.extend(of_images(batch))
            photos.see(batch)
            for request, kept, scores in zip(asked, chunks, maps, strict=True):
                kept.append(scores.detach().float().cpu())
                if finite:
                    _check_finite(request, vit, batch, used, kept[-1], begin)
            begin += len(batch)
            tell(begin, count)
    if not chosen:
        raise PatchlightError("no images were given; give a tensor, PIL image(s) or path(s)")
    of = {"weights": fingerprint(vit.model), "images": tuple(hashes), "photos": tuple(photos.kept)}
    explained = Targets.joined(chosen)
    results = Attributions(
        (request.label, attribution_of(vit, request, torch.cat(kept), explained, seed, of))
        for request, kept in zip(asked, chunks, strict=True)
    )
    return results[method] if isinstance(method, str) else results


def compute(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int, first: int = 0
) -> tuple[Targets, list[Tensor]]:
    """The maps [B,T,h,w] of every request, each in its own precision, on one batch (from image `first` on).

    White-box requests are grouped by backward rule, score and precision; each group is one forward and one backward per
    class. Requests without a gradient join the first group of their precision.
    """
    maps: dict[int, Tensor] = {}
    for group in _groups(requests, vit):
        rule, score = _rule_and_score([requests[i] for i in group])
        jobs = [job(requests[i], vit) for i in group]
        seen = run_pass(vit, batch, targets, score, rule, jobs, precision=requests[group[0]].precision(vit))
        targets = seen.targets if targets is None else targets
        for j, i in enumerate(group):
            maps[i] = _finish(requests[i], vit, seen, j)
    if targets is None:
        targets = predicted(vit.logits(batch))
    for i, request in enumerate(requests):
        if i not in maps:
            maps[i] = ask(request, vit, batch, targets, seed)
    if _overflows(vit, requests, maps):
        vit.overflows = True  # float16 is not tried again, and the maps say so
        return compute(vit, batch, requests, targets, seed, first)
    for i, request in enumerate(requests):
        _warn_if_degenerate(request, vit, maps[i], first)
    return targets, [maps[i] for i in range(len(requests))]


def _overflows(vit: Anatomy, requests: Sequence[Request], maps: Mapping[int, Tensor]) -> bool:
    """Whether a map that was left to "auto" has lost its numbers in float16."""
    auto = [i for i, r in enumerate(requests) if r.settings.get("precision") == "auto" and r.precision(vit) == "fp16"]
    return bool(auto) and not bool(torch.cat([maps[i].flatten() for i in auto]).isfinite().all())


def _groups(requests: Sequence[Request], vit: Anatomy) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    asked = [(i, request, request.precision(vit)) for i, request in enumerate(requests) if request.in_pass]
    for i, request, precision in asked:
        if request.backward:
            groups.setdefault((precision, request.rule.name, request.score), []).append(i)
    for i, request, precision in asked:
        if not request.backward:
            same = next((key for key in groups if key[0] == precision), (precision,))
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
    return request.composition.blocks(vit, request.settings) if request.composition is not None else ()


def finish(request: Request, vit: Anatomy, seen: Pass, of: int = 0, target: int = 0) -> Tensor:
    """The map [B,h,w] of the explained class of number `target`, from the layer maps of job `of`."""
    values = seen.layers(of, target)
    if request.level == "pixel":
        image: Tensor = values[PIXELS]
        return image
    assert request.composition is not None
    combine = request.composition.function
    maps = LayerMaps(values, vit, vit.pool_row(seen.logits, seen.pool), seen.end(target), _tail(request))
    result = combine(maps, **accepted(combine, request.settings))
    adds_end = isinstance(request.method, LayerMap) and request.method.adds_end
    if adds_end and request.settings.get("include_bias", True) and maps.end.bias is not None:
        result = result + maps.end.bias
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
    if not request.backward:
        return finish(request, vit, seen, j)[:, None].expand(-1, seen.targets.count, -1, -1)
    return torch.stack([finish(request, vit, seen, j, t) for t in range(seen.targets.count)], 1)


def ask(request: Request, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
    """The maps [B,T,h,w] of a method that takes an Ask."""
    if isinstance(request.method, Ablates):
        return _asked(request, vit, images, targets, seed)
    vit = vit.wide()
    images = images.to(vit.dtype)
    if not request.method.class_specific:
        return _asked(request, vit, images, targets.column(0), seed)[:, None].expand(-1, targets.count, -1, -1)
    return torch.stack([_asked(request, vit, images, targets.column(t), seed) for t in range(targets.count)], 1)


def _asked(request: Request, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
    ablation = {key: request.settings[key] for key in ABLATION if key in request.settings}
    precision = request.precision(vit)
    given = Ask(vit, images, targets, request.score, seed, request.rule, _blocks(request, vit), ablation, precision)
    function = request.method.function
    result: Tensor | Pass = function(given, **accepted(function, request.settings))
    return finish(request, vit, result) if isinstance(result, Pass) else result


def _warn_if_degenerate(request: Request, vit: Anatomy, maps: Tensor, first: int) -> None:
    advice = request.method.advice
    reason = advice({**request.settings, "rule": request.rule.name}, vit) if advice is not None else None
    if reason is None:
        flat = maps.detach().flatten(2)
        dead = (first + constant(flat).any(1).nonzero().flatten()).tolist()
        if dead and flat.shape[-1] > 1:
            reason = f"the map of image {', '.join(map(str, dead[:8]))} is constant"
            reason += f": {request.method.constant}" if request.method.constant else ""
    if reason is not None:
        warn(f"{request.name}: {reason}", DegenerateMap)


def _check_finite(request: Request, vit: Anatomy, batch: Tensor, targets: Targets, maps: Tensor, first: int) -> None:
    """Refuse maps with NaN or infinity: which image, which method, and where the numbers were lost."""
    broken = (~maps.isfinite()).flatten(1).any(1)
    if not bool(broken.any()):
        return
    i = int(broken.nonzero()[0])
    logits = vit.logits(batch)
    if not bool(logits[i].isfinite().all()):
        reason = "the model's logits are not finite there"
    elif not bool(score_of(logits, targets, request.score, vit.sigmoid)[i].isfinite().all()):
        reason = "the score made of the model's logits is not finite there"
    else:
        reason = f"its numbers overflow {str(vit.dtype).removeprefix('torch.')}"
    reason += "; try the model in float32" if vit.dtype in (torch.float16, torch.bfloat16) else ""
    raise NotFinite(f"the map of image {first + i} by {request.name} is not finite: {reason}")


_OPTIONS = ("target", "score", "seed", "batch_size", "progress", "finite")


def default_batch_size(vit: Anatomy) -> int:
    """As many images as keep attention and its gradient, all heads and blocks, in about 1.5 GB; 1 to 32."""
    per_image = 2 * 4 * max(vit.depth, 1) * vit.heads * vit.tokens**2
    return max(1, min(32, int(1.5e9 / per_image)))


def attribution_of(
    vit: Anatomy, request: Request, scores: Tensor, targets: Targets, seed: int, of: dict[str, Any]
) -> Attribution:
    """The result of a request: maps [B,T,h,w] with their provenance; `of` are weights, images and photos."""
    several = targets.several
    return Attribution(
        scores=scores if several else scores[:, 0],
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
        seed=seed,
        precision=request.precision(vit),
        versions=versions(),
        preprocess=vit.preprocess,
        extent=vit.extent if request.level == "token" and tuple(vit.extent) != tuple(vit.preprocess.size) else None,
        **of,
    )

"""`explain`: from images and method names to attributions, all white-box methods of a rule in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from patchlight.anatomy import Anatomy, wrap
from patchlight.attribution import Attribution, versions
from patchlight.errors import PatchlightError, warn
from patchlight.fingerprints import fingerprint, of_images
from patchlight.registry import Request, check_supported, resolve
from patchlight.rules import RULES
from patchlight.targets import Score, Target, Targets, predicted, resolve_targets
from patchlight.trace import Pass, run_pass

Progress = Callable[[int, int], None]


class DegenerateMap(UserWarning):
    """A map that cannot say anything, with the reason and what to use instead."""


@overload
def explain(
    vit: Anatomy | nn.Module, images: Any, method: str = ..., target: Target = ..., **options: Any
) -> Attribution: ...
@overload
def explain(
    vit: Anatomy | nn.Module,
    images: Any,
    method: Sequence[str] | Mapping[str, Mapping[str, Any]],
    target: Target = ...,
    **options: Any,
) -> dict[str, Attribution]: ...
@torch.inference_mode(False)
def explain(
    vit: Anatomy | nn.Module,
    images: Any,
    method: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = "genatt",
    target: Target = None,
    *,
    score: Score | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Attribution | dict[str, Attribution]:
    """Explain a model's decision about images: which patches speak for the target class.

    `images`: a preprocessed [B,C,H,W] tensor, PIL image(s) or path(s). `method`: a name, a list of names, or a dict
    of names and their settings; the latter two give a dict by the names asked, from one forward and one backward per
    backward rule. `target`: None (the prediction), a class index or label name, one per image, several per image
    (a list of lists or [B,T]), or a pair (a, b) for a against b. `score`: "logit", "probability" or a callable of the
    logits. Further keywords are the method's settings.

    >>> att = pl.explain(vit, "cat.jpg", method="genatt", target="tabby")      # doctest: +SKIP
    """
    vit = wrap(vit)
    if not isinstance(seed, int):
        raise PatchlightError(f"seed {seed!r} is a {type(seed).__name__}; give an integer")
    requests = _requests(method, settings, score)
    for request in requests:
        check_supported(request, vit)
    if isinstance(images, torch.Tensor) or not isinstance(images, Sequence) or isinstance(images, str):
        images = vit.batch(images)
    count = len(images)
    if count == 0:
        raise PatchlightError("no images were given; give a tensor, PIL image(s) or path(s)")
    targets = resolve_targets(target, count, vit.classes, vit.labels)
    size = default_batch_size(vit) if batch_size is None else batch_size
    if size < 1:
        raise PatchlightError(f"batch_size {size} is not possible; give 1 or more")
    chunks: list[list[Tensor]] = [[] for _ in requests]
    chosen: list[Targets] = []
    hashes: list[str] = []
    for begin in range(0, count, size):
        part = slice(begin, begin + size)
        batch = images[part] if isinstance(images, torch.Tensor) else vit.batch(images[part])
        used, maps = compute(vit, batch, requests, None if targets is None else targets[part], seed, begin)
        chosen.append(used)
        hashes.extend(of_images(batch))
        for kept, scores in zip(chunks, maps, strict=True):
            kept.append(scores.float().cpu())
        if progress is not None:
            progress(min(begin + size, count), count)
    explained = _joined(chosen)
    results = {
        request.asked: _attribution(vit, request, torch.cat(kept), explained, seed, tuple(hashes))
        for request, kept in zip(requests, chunks, strict=True)
    }
    return results[method] if isinstance(method, str) else results


def compute(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int, first: int = 0
) -> tuple[Targets, list[Tensor]]:
    """The maps [B,T,h,w] of every request, in the model's own precision, on one batch (from image `first` on).

    White-box requests are grouped by backward rule and score; each group is one forward and one backward per class.
    Requests without a gradient join the first group.
    """
    maps: dict[int, Tensor] = {}
    for group in _groups(requests):
        rule, score = _rule_and_score([requests[i] for i in group])
        seen = run_pass(vit, batch, targets, score, rule, [requests[i].job(vit) for i in group])
        targets = seen.targets if targets is None else targets
        for j, i in enumerate(group):
            maps[i] = _finish(requests[i], vit, seen, j)
    if targets is None:
        targets = predicted(vit.logits(batch))
    for i, request in enumerate(requests):
        if i not in maps:
            maps[i] = _asked(request, vit, batch, targets, seed)
        _warn_if_degenerate(request, vit, maps[i], first)
    return targets, [maps[i] for i in range(len(requests))]


def _groups(requests: Sequence[Request]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    forward_only: list[int] = []
    for i, request in enumerate(requests):
        if not request.method.whitebox or request.method.own_pass:
            continue
        if request.needs_backward():
            groups.setdefault((request.rule.name, request.score), []).append(i)
        else:
            forward_only.append(i)
    if not forward_only:
        return list(groups.values())
    first, *rest = groups.values() if groups else [[]]
    return [[*first, *forward_only], *rest]


def _rule_and_score(requests: Sequence[Request]) -> tuple[Any, Score]:
    for request in requests:
        if request.needs_backward():
            return request.rule, request.score
    return RULES["plain"], "logit"


def _finish(request: Request, vit: Anatomy, seen: Pass, j: int) -> Tensor:
    if not request.needs_backward():
        one = request.finish(seen.values[0][j], vit, seen, 0)
        return one[:, None].expand(-1, seen.targets.count, -1, -1)
    return torch.stack([request.finish(seen.values[t][j], vit, seen, t) for t in range(seen.targets.count)], 1)


def _asked(request: Request, vit: Anatomy, batch: Tensor, targets: Targets, seed: int) -> Tensor:
    def one(t: int) -> Tensor:
        return request.ask(vit, batch, targets.column(t), seed)

    if request.method.ablates:
        return request.ask(vit, batch, targets, seed)
    if not request.method.class_specific:
        return one(0)[:, None].expand(-1, targets.count, -1, -1)
    return torch.stack([one(t) for t in range(targets.count)], 1)


def _warn_if_degenerate(request: Request, vit: Anatomy, maps: Tensor, first: int) -> None:
    advice = request.method.advice
    reason = advice({**request.settings, "rule": request.rule.name}, vit) if advice is not None else None
    if reason is None:
        flat = maps.detach().flatten(2)
        dead = (first + (flat.amax(-1) == flat.amin(-1)).any(1).nonzero().flatten()).tolist()
        if dead and flat.shape[-1] > 1:
            reason = f"the map of image {', '.join(map(str, dead[:8]))} is constant"
            reason += f": {request.method.constant}" if request.method.constant else ""
    if reason is not None:
        warn(f"{request.name}: {reason}", DegenerateMap)


def _requests(
    method: str | Sequence[str] | Mapping[str, Mapping[str, Any]], settings: dict[str, Any], score: Score | None
) -> list[Request]:
    if isinstance(method, str):
        return [resolve(method, settings, score)]
    if not method:
        raise PatchlightError("no method was named; give a name, a list of names, or a dict of names and settings")
    if isinstance(method, Mapping):
        return [resolve(name, {**settings, **own}, score) for name, own in method.items()]
    return [resolve(name, settings, score) for name in dict.fromkeys(method)]


def default_batch_size(vit: Anatomy) -> int:
    """As many images as keep attention and its gradient, all heads and blocks, in about 1.5 GB; 1 to 32."""
    per_image = 2 * 4 * max(vit.depth, 1) * vit.heads * vit.tokens**2
    return max(1, min(32, int(1.5e9 / per_image)))


def _joined(targets: list[Targets]) -> Targets:
    against = [t.against for t in targets if t.against is not None]
    index = torch.cat([t.index for t in targets])
    return Targets(index, torch.cat(against) if against else None, targets[0].several)


def _attribution(
    vit: Anatomy, request: Request, scores: Tensor, targets: Targets, seed: int, images: tuple[str, ...]
) -> Attribution:
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
        seed=seed,
        versions=versions(),
        preprocess=vit.preprocess,
        weights=fingerprint(vit.model),
        images=images,
    )

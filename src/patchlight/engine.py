"""`explain`: from images and method names to attributions, all white-box methods of a rule in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard, overload

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.attribution import Attribution, Attributions, versions
from patchlight.core.errors import DegenerateMap, NotFinite, PatchlightError, integer, warn
from patchlight.core.fingerprints import hash_images, identity
from patchlight.core.images import in_batches
from patchlight.core.photos import Photos
from patchlight.core.progress import Progress, show_progress
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.targets import Score, Target, Targets, resolve_targets, target_scores
from patchlight.evidence.graphs import forget
from patchlight.evidence.passes import fitting
from patchlight.evidence.precision import HALF
from patchlight.methods.base import Ablates, Estimate
from patchlight.methods.maps import estimate, in_stacks
from patchlight.methods.requests import Request, check_contrast, check_supported, resolve


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
    method: Selection | Sequence[Request] = "auto",
    target: Target = None,
    *,
    against: Target = None,
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
        results = _explained(vit, images, asked, _pairs(target, against), seed, size, progress, finite)
    return results[method] if isinstance(method, str) else results


def _explained(
    vit: Anatomy,
    images: Any,
    requests: Sequence[Request],
    target: Target,
    seed: int,
    size: int | None,
    progress: Progress | bool,
    finite: bool,
) -> Attributions:
    for request in requests:
        check_supported(request, vit)
    size = default_batch_size(vit, requests) if size is None else size
    photos = Photos(vit.preprocess)
    count, batches = in_batches(images, size, vit.preprocess, vit.channels, photos.add)
    targets = resolve_targets(target, count, vit.outcomes, vit.labels)
    for request in requests:
        check_contrast(request, targets, vit)
    parts: list[list[Estimate]] = []
    chosen: list[Targets] = []
    hashes: list[str] = []
    begin = 0
    with show_progress(progress, "explaining") as tell:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            wanted = None if targets is None else targets.part(begin, len(batch), count)
            used, found, size = _within_memory(vit, batch, requests, wanted, seed, begin, size)
            hashes_of_batch = hash_images(batch)
            _warn_of_references(vit, hashes_of_batch, used, begin)
            photos.see(batch)
            found = _on_cpu(found)
            if finite:
                for request, one in zip(requests, found, strict=True):
                    _check_finite(request, vit, batch, used, one, begin)
            chosen.append(used)
            parts.append(found)
            hashes.extend(hashes_of_batch)
            begin += len(batch)
            tell(begin, count)
    if not chosen:
        raise PatchlightError("no images were given; give a tensor, PIL image(s) or path(s)")
    of = {"weights": identity(vit), "images": tuple(hashes), "photos": tuple(photos.kept)}
    explained = Targets.concat(chosen)
    results = Attributions()
    for request, own in zip(requests, zip(*parts, strict=True), strict=True):
        results[request.label] = attribution_of(vit, request, Estimate.concat(own), explained, seed, of)
    return results


def _pairs(target: Target, against: Target) -> Target:
    """A target with the class, or a list of the classes, that it is contrasted with."""
    if against is None:
        return target
    if target is None or isinstance(target, tuple):
        given = "no target was given" if target is None else f"target={target!r} is a pair already"
        raise PatchlightError(f"against={against!r} needs one class as the target, but {given}; give target=…")
    if not _several(target):
        return [(target, other) for other in against] if _several(against) else (target, against)
    others = list(against) if _several(against) else [against] * len(target)
    if len(others) != len(target):
        raise PatchlightError(f"against has length {len(others)} but target has length {len(target)}; give one each")
    return list(zip(target, others, strict=True))


def _several(target: Target) -> TypeGuard[list[Any]]:
    return isinstance(target, list | np.ndarray | Tensor) and getattr(target, "ndim", 1) > 0


def _on_cpu(found: Sequence[Estimate]) -> list[Estimate]:
    """Maps and errors in float32 on the CPU; the maps of one shape travel together."""
    scores = in_stacks([one.maps for one in found], lambda stack: stack.float())
    errors = [None if one.error is None else one.error.detach().float().cpu() for one in found]
    return [replace(one, maps=maps, error=e) for one, maps, e in zip(found, scores, errors, strict=True)]


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
    joined = Targets.concat([used for used, _ in parts])
    return joined, [Estimate.concat(found) for found in zip(*(found for _, found in parts), strict=True)], size


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


def _check_finite(request: Request, vit: Anatomy, batch: Tensor, targets: Targets, found: Estimate, first: int) -> None:
    """Refuse maps with NaN or infinity: which image, which method, and where the numbers were lost."""
    broken = ~found.maps.isfinite().flatten(1).all(1)
    if not bool(broken.any()):
        return
    i = int(broken.nonzero()[0])
    logits = vit.logits(batch)
    if not bool(logits[i].isfinite().all()):
        reason = "the model's logits are not finite there"
    elif not bool(target_scores(logits, targets, request.score, vit.outputs)[i].isfinite().all()):
        reason = "the score made of the model's logits is not finite there"
    else:
        half = HALF.get(found.precision)
        reason = f"its numbers overflow {str(half or vit.dtype).removeprefix('torch.')}"
        reason += "; precision='tf32' or 'full' may hold them" if half is not None else ""
    reason += "; try the model in float32" if vit.dtype in (torch.float16, torch.bfloat16) else ""
    raise NotFinite(f"the map of image {first + i} by {request.name} is not finite: {reason}")


_OPTIONS = ("target", "against", "score", "seed", "batch_size", "progress", "finite")


def default_batch_size(vit: Anatomy, requests: Sequence[Request] = ()) -> int:
    """How many images at once: 1 to 32, such that attention and its gradient, all heads and blocks, have about 1.5 GB.

    Of methods that all run passes on CUDA, what memory has room for (`fitting`), as a power of two: a size that changes
    with every byte that is free would round differently each time.
    """
    if vit.device.type != "cuda" or not requests or any(isinstance(r.method, Ablates) for r in requests):
        return max(1, min(32, int(1.5e9 / (2 * 4 * max(vit.depth, 1) * vit.heads * vit.tokens**2))))
    wide = [r for r in requests if r.suited(vit).precision not in HALF]
    return 1 << fitting(vit, not wide, any(r.needs & {"A", "G"} for r in wide)).bit_length() - 1


def attribution_of(
    vit: Anatomy, request: Request, found: Estimate, targets: Targets, seed: int, of: dict[str, Any]
) -> Attribution:
    """The result of a request: maps [B,T,h,w] with their provenance; `of` are weights, images and photos."""
    request = request.suited(vit)
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
        precision=found.precision or request.precision,
        ignores_class=request.ignores_class,
        **of,
    )

"""`explain`: from images and method names to attributions; white-box methods with the same rule share one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.attribution import Attribution, Attributions, versions
from patchlight.core.errors import DegenerateMap, NotFinite, PatchlightError, integer, warn
from patchlight.core.fingerprints import hash_images, identity
from patchlight.core.images import GIVE_IMAGES, in_batches
from patchlight.core.layout import IMAGE_AXES, Geometry
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

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head


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
    head: Head | None = None,
    against: Target = None,
    score: Score | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | bool = True,
    finite: bool = True,
    **settings: Any,
) -> Attribution | Attributions:
    """Explain a model's prediction for images: which patches contribute to the score of the target class.

    Args:
        vit: The model: the result of `pl.load`, or a torch module.
        images: Paths, PIL images, numpy arrays [H,W,C] (uint8, or floats from 0 to 1), an array [N,H,W,C], or a
            preprocessed tensor [B,C,H,W]. A generator or DataLoader of these is streamed; of tuples such as
            (images, labels), the first element is used.
        method: A name, a list of names, or a dict of names and settings. With {"label": "name"} or
            {"label": {"method": "name", …}}, the keys are free labels. "auto" is the best one-pass method that works
            on the model, "best" the most faithful one.
        target: The class to explain: an index or a label name. A list has one class per image, a list of lists several
            per image, and a tuple (a, b) explains a against b. Default: the prediction.
        head: The question, one of `pl.heads`, instead of the model's own: sentences, reference images, neurons, a box,
            a region, an answer. The same as `pl.wrap(vit, head)`.
        against: The class that `target` is contrasted with; the same as target=(target, against).
        score: What is explained: "logit", "probability", "cosine" or a function of the logits.
        seed: Random seed of sampling methods.
        batch_size: Images per batch. Default: what fits into memory.
        progress: True for a progress bar if the call takes more than two seconds, False for none, or a function of
            (images done, number of images or None).
        finite: Whether a map with NaN or infinity is an error.
        settings: Settings of the method.

    Returns:
        An `Attribution`, or for several methods `Attributions`: a dict by method.

    Example:
        >>> att = pl.explain(vit, "cat.jpg", target="cat", against="dog")                       # doctest: +SKIP
        >>> att.show()                                                                          # doctest: +SKIP
    """
    vit = wrap(vit, head)
    vit, images = (vit.ask(vit.default_question()) if vit.task and vit.head is None else vit).fit(images)
    seed = integer("seed", seed, 0)
    size = None if batch_size is None else integer("batch_size", batch_size, 1)
    requests = resolve_all(method, settings, Request, "method", lambda label, s: resolve(label, s, score, _OPTIONS))
    requests = [request.suited(vit) for request in requests]
    with vit.settled():
        classes = _pairs(target, against)
        if vit.question is not None:
            results = _answer(vit, images, requests, classes, seed, progress, finite)
        else:
            results = _explain(vit, images, requests, classes, seed, size, progress, finite)
    return results[method] if isinstance(method, str) else results


def _answer(
    vit: Anatomy,
    images: Any,
    requests: Sequence[Request],
    target: Target,
    seed: int,
    progress: Progress | bool,
    finite: bool,
) -> Attributions:
    """Explain the question for each image; some questions are prepared for every image."""
    sizes: list[tuple[int, int] | None] = []
    count, batches = in_batches(
        images, 1, vit.preprocess, vit.channels, lambda picture: sizes.append(None if picture is None else picture.size)
    )
    parts: list[Attributions] = []
    with show_progress(progress, "explaining") as report:
        for image in batches:
            prepared = vit.prepared(image, sizes[len(parts)])
            assert prepared.question is not None
            if target is None:
                image_target = prepared.question.default_target()
            else:
                image_target = _target_of_image(target, len(parts), count)
            parts.append(_explain(prepared, image, requests, image_target, seed, 1, False, finite))
            report(len(parts), count)
    if not parts:
        raise PatchlightError(f"no images were given; {GIVE_IMAGES}")
    return Attributions({label: Attribution.concat([part[label] for part in parts]) for label in parts[0]})


def _target_of_image(target: Target, i: int, count: int | None) -> Target:
    """The target of image number i of `count`."""
    if not several(target):
        return target
    if count is not None and len(target) != count:
        raise PatchlightError(f"target has length {len(target)} but there are {count} images; give one class per image")
    return [target[i]]


def _explain(
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
    explained: list[Targets] = []
    hashes: list[str] = []
    begin = 0
    with show_progress(progress, "explaining") as report:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            classes = None if targets is None else targets.part(begin, len(batch), count)
            classes, estimates, size = _within_memory(vit, batch, requests, classes, seed, begin, size)
            hashes_of_batch = hash_images(batch)
            _warn_of_references(vit, hashes_of_batch, classes, begin)
            photos.see(batch)
            estimates = _on_cpu(estimates)
            if finite:
                for request, estimated in zip(requests, estimates, strict=True):
                    _check_finite(request, vit, batch, classes, estimated, begin)
            explained.append(classes)
            parts.append(estimates)
            hashes.extend(hashes_of_batch)
            begin += len(batch)
            report(begin, count)
    if not explained:
        raise PatchlightError(f"no images were given; {GIVE_IMAGES}")
    origin = {"weights": identity(vit), "images": tuple(hashes), "photos": tuple(photos.photos)}
    joined = Targets.concat(explained)
    results = Attributions()
    for request, estimates_of in zip(requests, zip(*parts, strict=True), strict=True):
        results[request.label] = attribution_of(vit, request, Estimate.concat(estimates_of), joined, seed, origin)
    return results


def _pairs(target: Target, against: Target) -> Target:
    """Combine a target with the classes that it is contrasted with to pairs."""
    if against is None:
        return target
    if target is None or isinstance(target, tuple):
        why = "no target was given" if target is None else f"target={target!r} is already a pair"
        raise PatchlightError(f"against={against!r} needs one class as the target, but {why}; give target=…")
    if not several(target):
        return [(target, other) for other in against] if several(against) else (target, against)
    against = list(against) if several(against) else [against] * len(target)
    if len(against) != len(target):
        raise PatchlightError(f"against has length {len(against)} but target has length {len(target)}; give one each")
    return list(zip(target, against, strict=True))


def several(target: Target) -> TypeGuard[list[Any]]:
    """Whether a target has one entry per image."""
    return isinstance(target, list | np.ndarray | Tensor) and getattr(target, "ndim", 1) > 0


def _on_cpu(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Move maps and errors to the CPU, in float32; maps of one shape are copied together."""
    scores = in_stacks([each.maps for each in estimates], lambda stack: stack.float())
    errors = [None if each.error is None else each.error.detach().float().cpu() for each in estimates]
    return [replace(each, maps=maps, error=e) for each, maps, e in zip(estimates, scores, errors, strict=True)]


def _within_memory(
    vit: Anatomy, batch: Tensor, requests: Sequence[Request], targets: Targets | None, seed: int, first: int, size: int
) -> tuple[Targets, list[Estimate], int]:
    """Run `estimate` on at most `size` images at once, halved whenever memory runs out; also returns the last size."""
    parts: list[tuple[Targets, list[Estimate]]] = []
    begin = 0
    while begin < len(batch):
        chunk = batch[begin : begin + size]
        classes = None if targets is None else targets[begin : begin + size]
        try:
            parts.append(estimate(vit, chunk, requests, classes, seed, first + begin))
            begin += len(chunk)
        except (torch.OutOfMemoryError, MemoryError):
            if size == 1:
                raise PatchlightError("one image does not fit into memory; give fewer methods at once") from None
            size = max(1, min(size, len(chunk)) // 2)
            forget(vit.net)
    if len(parts) == 1:
        return *parts[0], size
    joined = Targets.concat([classes for classes, _ in parts])
    return joined, [Estimate.concat(each) for each in zip(*(estimates for _, estimates in parts), strict=True)], size


def _warn_of_references(vit: Anatomy, hashes: Sequence[str], targets: Targets, first: int) -> None:
    """Warn of images whose similarity to themselves is explained."""
    references = [] if vit.head is None else vit.head.itself(hashes, targets.index)
    if references:
        images = ", ".join(str(first + i) for i in references[:8])
        warn(
            f"image {images} is the reference itself: its similarity is 1 without a gradient, so its map shows only "
            "rounding errors; explain another image",
            DegenerateMap,
        )


def _check_finite(
    request: Request, vit: Anatomy, batch: Tensor, targets: Targets, estimated: Estimate, first: int
) -> None:
    """Raise NotFinite for maps with NaN or infinity, with the image, the method and the cause."""
    not_finite = ~estimated.maps.isfinite().flatten(1).all(1)
    if not bool(not_finite.any()):
        return
    i = int(not_finite.nonzero()[0])
    logits = vit.logits(batch)
    if not bool(logits[i].isfinite().all()):
        reason = "the model's logits are not finite"
    elif not bool(target_scores(logits, targets, request.score, vit.outputs)[i].isfinite().all()):
        reason = "the score computed from the model's logits is not finite"
    else:
        half = HALF.get(estimated.precision)
        reason = f"its numbers overflow {str(half or vit.dtype).removeprefix('torch.')}"
        reason += "; precision='tf32' or 'full' may help" if half is not None else ""
    reason += "; try the model in float32" if vit.dtype in (torch.float16, torch.bfloat16) else ""
    raise NotFinite(f"the map of image {first + i} by {request.name} is not finite: {reason}")


_OPTIONS = ("target", "head", "against", "score", "seed", "batch_size", "progress", "finite")


def default_batch_size(vit: Anatomy, requests: Sequence[Request] = ()) -> int:
    """The default number of images per batch.

    It is 1 to 32, so that attention and its gradient (all heads and blocks) take about 1.5 GB. If all methods run
    passes on CUDA, it is the largest power of two that fits in memory; a size that changes with every free byte would
    change the rounding of the results.
    """
    if vit.device.type != "cuda" or not requests or any(isinstance(r.method, Ablates) for r in requests):
        return max(1, min(32, int(1.5e9 / (2 * 4 * max(vit.depth, 1) * vit.heads * vit.tokens**2))))
    wide = [r for r in requests if r.suited(vit).precision not in HALF]
    return 1 << fitting(vit, not wide, any(r.needs & {"A", "G"} for r in wide)).bit_length() - 1


def _geometry(vit: Anatomy, request: Request) -> Geometry:
    """The geometry of a map: cells, or single pixels."""
    size = vit.geometry.size
    return vit.geometry if request.level == "token" else Geometry.even(size, size, unit=vit.geometry.unit)


def attribution_of(
    vit: Anatomy, request: Request, estimated: Estimate, targets: Targets, seed: int, origin: dict[str, Any]
) -> Attribution:
    """The result of a request: maps [B,T,h,w] with their provenance.

    Args:
        vit: The model.
        request: The method.
        estimated: The maps.
        targets: The explained classes.
        seed: The random seed.
        origin: The fields `weights`, `images` and `photos` of the attribution.
    """
    request = request.suited(vit)
    several, scores, error = targets.several, estimated.maps, estimated.error
    return Attribution(
        scores=scores if several else scores[:, 0],
        error=error if several or error is None else error[:, 0],
        samples=() if estimated.samples is None else tuple(estimated.samples.tolist()),
        facts={name: tuple(values.tolist()) for name, values in estimated.facts.items()},
        target=targets.index if several else targets.index[:, 0],
        against=None if targets.against is None else targets.against[:, 0],
        method=request.name,
        settings={k: v for k, v in request.settings.items() if k != "level"},
        level=request.level,
        score=request.score if isinstance(request.score, str) else getattr(request.score, "__name__", "callable"),
        model=vit.name,
        image_size=vit.geometry.size,
        labels=tuple(vit.label(int(i)) for i in targets.index.flatten()),
        against_labels=() if targets.against is None else tuple(vit.label(int(i)) for i in targets.against[:, 0]),
        head={} if vit.head is None else vit.head.about(),
        seed=seed,
        versions=versions(),
        preprocess=vit.preprocess if vit.axes == IMAGE_AXES else None,
        extent=vit.extent if request.level == "token" and tuple(vit.extent) != tuple(vit.geometry.size) else None,
        axes=vit.axes,
        geometry=None if vit.axes == IMAGE_AXES else _geometry(vit, request),
        precision=estimated.precision or request.precision,
        ignores_class=request.ignores_class,
        question=vit.question and vit.question.general,
        words=() if vit.question is None or not vit.question.words else (tuple(vit.question.words),),
        **origin,
    )

"""What is computed for each request: functions of a site and what was asked, which know nothing of the web."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError, Unsupported, hearing
from patchlight.engine import explain
from patchlight.evidence.ablation import Ablation, PixelMasks, TokenSubsets
from patchlight.evidence.fills import fill_images
from patchlight.evidence.passes import LayerJob, run_pass
from patchlight.methods.requests import Request, refusal
from patchlight.metrics.base import on_grid
from patchlight.study.evaluate import evaluate
from patchlight.study.faithfulness import Curves, Trial, sanity_words
from patchlight.web.album import Held
from patchlight.web.jobs import Work, in_words
from patchlight.web.schemas import (
    Ablate,
    Ablated,
    BlockInside,
    Curve,
    Explain,
    Inside,
    InsideResult,
    Map,
    MeasureAsked,
    MeasureResult,
    Predict,
    Predicted,
    Randoms,
)
from patchlight.web.schemas import Truth as TruthTold
from patchlight.web.site import Asked, Made, Site, finite, quantity_of


def predict(site: Site, asked: Predict) -> Predicted:
    question = site.understood(asked)
    return question.said(question.logits, asked.most)[0]


def ablate(site: Site, asked: Ablate) -> Ablated:
    """What the model says of variants without some patches."""
    question = site.understood(asked)
    vit, image = question.vit, question.held.tensor
    rows, columns = vit.grid
    for some in asked.removed:
        if some and max(some) >= rows * columns:
            raise PatchlightError(f"patch {max(some)} is not there; patches are 0 to {rows * columns - 1}")
    shown = torch.ones(len(asked.removed), rows * columns)
    for v, some in enumerate(asked.removed):
        shown[v, some] = 0
    ablation = Ablation(vit, image, site.chunk, fine=True)
    owner = torch.zeros(len(shown), dtype=torch.long)
    if asked.unit == "patch":
        fill = fill_images(asked.fill, image, vit)
        logits = ablation.logits(PixelMasks(owner, shown.view(-1, rows, columns), fill))
    else:
        logits = _without_tokens(question, ablation, shown.bool())
    whole, *variants = question.said(torch.cat([question.logits, logits.float().cpu()]), asked.most)
    return Ablated(whole=whole, variants=variants)


def _without_tokens(question: Asked, ablation: Ablation, shown: Tensor) -> Tensor:
    vit = question.vit
    if vit.can_drop is not None:
        raise Unsupported(f"{vit.name} cannot drop tokens: {vit.can_drop}; unit 'patch' paints patches instead")
    if (vit.prefix == 0 or vit.pooling in ("avg", "max")) and not bool(shown.any(1).all()):
        raise PatchlightError(f"{vit.name} reads its class off the patches, so one at least must stay")
    lists = [TokenSubsets(torch.zeros(1, dtype=torch.long), row.nonzero().T) for row in shown]
    return ablation.logits(lists)


def explained(site: Site, asked: Explain, held: Held, work: Work) -> dict[str, Attribution]:
    """The maps by name; each is told to the job as it is finished, and so is what gave none."""
    question = site.understood(asked, held)
    found: dict[str, Attribution] = {}
    quick: list[Request] = []
    slow: list[Request] = []
    for method in asked.methods:
        try:
            request = site.request(method)
            reason = refusal(request.suited(question.vit), question.vit)
            if reason is not None:
                raise Unsupported(f"'{method.name}' does not work here: {reason}")
        except PatchlightError as error:
            _failed(work, method.name, error)
            continue
        kept = site.maps.get(_key(question, request, asked.seed))
        if kept is not None:
            found[request.label] = kept.found
            _told(work, request.label, kept)
        else:
            (quick if site.is_quick(request) else slow).append(request)
    if len(quick) > 1 and _together(site, question, quick, asked.seed, found, work):
        quick = []
    for request in [*quick, *slow]:
        _alone(site, question, [request], asked.seed, found, work)
    if not found:
        raise PatchlightError(next(iter(work.job.failures.values())))
    return found


def _together(
    site: Site, question: Asked, requests: list[Request], seed: int, found: dict[str, Attribution], work: Work
) -> bool:
    """Methods that share a pass; False where one of them spoils it, so that each is asked alone."""
    try:
        _explain(site, question, requests, seed, found, work)
    except PatchlightError:
        return False
    return True


def _alone(
    site: Site, question: Asked, requests: list[Request], seed: int, found: dict[str, Attribution], work: Work
) -> None:
    try:
        _explain(site, question, requests, seed, found, work)
    except PatchlightError as error:
        _failed(work, requests[0].label, error)


def _explain(
    site: Site, question: Asked, requests: list[Request], seed: int, found: dict[str, Attribution], work: Work
) -> None:
    begun = time.perf_counter()
    with hearing() as said:
        maps = explain(question.vit, question.held.tensor, requests, _target(question), seed=seed, progress=False)
    seconds = time.perf_counter() - begun
    for request in requests:
        found[request.label] = maps[request.label]
        own = [words.removeprefix(f"{request.name}: ") for words in said if words.startswith(f"{request.name}:")]
        kept = Made(maps[request.label], seconds / len(requests), "; ".join(own))
        site.maps.put(_key(question, request, seed), kept)
        if len(requests) == 1:
            site.seconds[request.label] = round(seconds, 3)
        _told(work, request.label, kept)


def _target(question: Asked) -> int | tuple[int, int]:
    return question.index if question.against is None else (question.index, question.against)


def _key(question: Asked, request: Request, seed: int) -> tuple[object, ...]:
    return (*question.key, request.name, repr(sorted(request.settings.items(), key=str)), seed)


def _failed(work: Work, name: str, error: PatchlightError) -> None:
    work.job.failures[name] = in_words(error)
    work.tell("job")


def _told(work: Work, label: str, made: Made) -> None:
    """Tell a map by the name that was asked for: another name of the method may have made it."""
    found = made.found
    told = Map(
        method=label,
        scores=numbers(found.scores[0]),
        error=None if found.error is None else numbers(found.error[0]),
        level=found.level,
        target=int(found.target[0]),
        target_label=found.explained[0],
        against=None if found.against is None else int(found.against[0]),
        against_label=found.opposed[0] if found.opposed else None,
        settings={key: value for key, value in found.settings.items() if key not in ("chunk", "precision", "compile")},
        seed=found.seed,
        seconds=round(made.seconds, 3),
        warning=made.warning,
    )
    work.job.maps.append(told)
    work.tell("map", told.model_dump_json())


def numbers(values: Tensor) -> list[list[float | None]]:
    """A map [h,w] as JSON knows it."""
    return [[finite(value) for value in row] for row in values.tolist()]


def trial_of(site: Site, question: Asked, asked: MeasureAsked) -> Trial:
    """The test that is asked for; its random orders are computed once."""
    own = (asked.steps, asked.unit, asked.fill, asked.randoms, asked.seed)
    return site.trials.once(
        (*question.key, *own), lambda: Trial(question.vit, question.held.tensor, question.targets, *own, site.chunk)
    )


def measure(site: Site, asked: MeasureAsked, held: Held, work: Work) -> None:
    """Deletion and insertion of methods' maps, and of random orders, told one by one."""
    question = site.understood(asked, held)
    trial = trial_of(site, question, asked)
    maps = explained(site, asked, held, work)
    random = trial.random
    result = MeasureResult(
        fractions=[round(float(n) / float(trial.removed[-1]), 6) for n in trial.removed],
        removed=trial.removed.tolist(),
        quantity=trial.quantity,
        random=Randoms(
            count=asked.randoms,
            curve=_mean_curve(random),
            low=finite(float(random.scores.min())),
            high=finite(float(random.scores.max())),
            scores=[finite(score) for score in random.scores.tolist()],
        ),
        methods=[],
    )
    work.job.measured = result
    work.tell("random", result.model_dump_json(exclude={"methods"}))
    for name, found in maps.items():
        truth = trial.of(on_grid(found.scores, question.vit)[0])
        told = TruthTold(
            method=name,
            order=truth.curves.orders[0].tolist(),
            curve=_curve(truth.curves),
            predictions=question.said(truth.curves.logits[0], 5),
            beaten=truth.beaten,
            better=truth.better,
            words=truth.words,
        )
        if asked.sanity:
            told.sanity, told.sanity_words = _sanity(question, found, asked.seed)
        result.methods.append(told)
        work.tell("truth", told.model_dump_json())


def _sanity(question: Asked, found: Attribution, seed: int) -> tuple[float | None, str]:
    """The similarity of a map to those of the model with its layers randomised."""
    try:
        with hearing():
            result = evaluate(
                question.vit, question.held.tensor, found, "randomisation", seed=seed, progress=False, current=True
            )
    except PatchlightError as error:
        return None, in_words(error)
    value = float(result.values[0])
    return finite(value), sanity_words(value)


def _curve(curves: Curves) -> Curve:
    return Curve(
        insertion=[finite(value) for value in curves.insertion[0].tolist()],
        deletion=[finite(value) for value in curves.deletion[0].tolist()],
        insertion_area=finite(float(curves.insertion_areas[0])),
        deletion_area=finite(float(curves.deletion_areas[0])),
        score=finite(float(curves.scores[0])),
    )


def _mean_curve(curves: Curves) -> Curve:
    return Curve(
        insertion=[finite(value) for value in curves.insertion.mean(0).tolist()],
        deletion=[finite(value) for value in curves.deletion.mean(0).tolist()],
        insertion_area=finite(float(curves.insertion_areas.mean())),
        deletion_area=finite(float(curves.deletion_areas.mean())),
        score=finite(float(curves.scores.mean())),
    )


def inside(site: Site, asked: Inside) -> InsideResult:
    """Attention to each patch block by block, and what the head makes of the tokens after each block."""
    question = site.understood(asked)
    vit = question.vit
    first = vit.prefix > 0 and vit.pooling not in ("avg", "max", "map")
    reads = "of the class token" if first else "the mean of all patches"
    attention, why_not = _attention(question, first)
    lens, no_lens = _lens(question)
    return InsideResult(
        attention=attention,
        attention_reason=why_not,
        reads=reads,
        lens=lens,
        lens_reason=no_lens,
        quantity=quantity_of(vit),
    )


def _attention(question: Asked, first: bool) -> tuple[list[list[float | None]] | None, str]:
    vit = question.vit
    if vit.attention is not None:
        return None, f"the attention of {vit.name} cannot be read: {vit.attention}"
    if vit.hierarchical or vit.depth == 0:
        return None, f"the stages of {vit.name} have several grids, so no row of attention reaches over all blocks"

    def row(evidence: object) -> Tensor:
        heads: Tensor = evidence.A.mean(1)  # type: ignore[attr-defined]
        return heads[:, 0] if first else heads[:, vit.prefix :].mean(1)

    job = LayerJob(row, frozenset("A"), tuple(range(vit.depth)), "attention")
    seen = run_pass(vit, question.held.tensor, question.targets, jobs=[job])
    rows = [vit.patches(seen.at(layer)).flatten(1)[0] for layer in range(vit.depth)]
    return [[finite(value) for value in one.tolist()] for one in rows], ""


def _lens(question: Asked) -> tuple[list[BlockInside] | None, str]:
    """What the readout says of the tokens after each block."""
    vit = question.vit
    if vit.hierarchical or vit.depth == 0:
        return None, f"the head of {vit.name} reads its last stage alone"
    logits = []
    with torch.inference_mode(False), torch.no_grad(), vit.steady():
        tokens = vit.embed(question.held.tensor)
        for index in range(vit.depth):
            tokens = vit.block(index, vit.merge(index, tokens))
            logits.append(vit.readout(tokens).float().cpu())
    said = question.said(torch.cat(logits), 3)
    return [BlockInside(block=i, predictions=one.predictions, asked=one.asked) for i, one in enumerate(said)], ""

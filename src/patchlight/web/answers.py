"""What is computed for each request: functions of a model service and a request, which know nothing of the web."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError, collect_warnings
from patchlight.evidence.ablation import Ablation, PixelMasks, TokenSubsets
from patchlight.evidence.fills import fill_images
from patchlight.evidence.passes import run_pass
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import LayerJob
from patchlight.methods.requests import Request
from patchlight.metrics.base import on_grid
from patchlight.metrics.deletion import check_tokens
from patchlight.study.evaluate import evaluate
from patchlight.study.faithfulness import Curves, sanity_words
from patchlight.study.run import Outcome, explain_each
from patchlight.web import schemas
from patchlight.web.jobs import RunningJob, describe_error
from patchlight.web.service import JobInput, ModelService, ResolvedQuestion, TimedMap, is_quick, quantity_of


def predict(service: ModelService, request: schemas.PredictRequest) -> schemas.PredictResult:
    question = service.resolve_question(request)
    return question.predictions(question.logits, request.most)[0]


def ablate(service: ModelService, request: schemas.AblateRequest) -> schemas.AblateResult:
    """What the model says of variants without some patches."""
    question = service.resolve_question(request)
    vit, image = question.vit, question.image.tensor
    rows, columns = vit.grid
    shown = torch.ones(len(request.removed), rows * columns)
    for v, patches in enumerate(request.removed):
        if patches and max(patches) >= rows * columns:
            raise PatchlightError(f"patch {max(patches)} is not there; patches are 0 to {rows * columns - 1}")
        shown[v, patches] = 0
    ablation = Ablation(vit, image, service.chunk, fine=True)
    if request.unit == "patch":
        owner = torch.zeros(len(shown), dtype=torch.long)
        fill = fill_images(request.fill, image, vit)
        logits = ablation.logits(PixelMasks(owner, shown.view(-1, rows, columns), fill))
    else:
        check_tokens(vit, left=int(shown.sum(1).min()))
        logits = ablation.logits([TokenSubsets(torch.zeros(1, dtype=torch.long), row.nonzero().T) for row in shown])
    whole, *variants = question.predictions(torch.cat([question.logits, logits.float().cpu()]), request.most)
    return schemas.AblateResult(whole=whole, variants=variants)


def explain(given: JobInput[Any], job: RunningJob) -> dict[str, Attribution]:
    """The maps by name; each becomes an event of the job as it is finished, and so does why a method gave none."""
    service, question, seed = given.service, given.question, given.request.seed
    maps: dict[str, Attribution] = {}
    missing: dict[str, Request] = {}

    def add(label: str, found: TimedMap) -> None:
        maps[label] = found.attribution
        job.status.maps.append(_map_result(label, found))
        job.tell("map", job.status.maps[-1].model_dump_json())

    def fail(label: str, reason: str) -> None:
        job.status.failures[label] = reason
        job.tell("job")

    for name, method in given.methods.items():
        if isinstance(method, PatchlightError):
            fail(name, describe_error(method))
        elif (cached := service.cached_map(question, method, seed)) is not None:
            add(name, cached)
        else:
            missing[name] = method

    def finished(outcomes: Mapping[str, Outcome[Attribution]]) -> None:
        for label, outcome in outcomes.items():
            if outcome.result is None:
                fail(label, outcome.error)
                continue
            prefix = f"{missing[label].name}: "
            warnings = dict.fromkeys(words.removeprefix(prefix) for words in said if words.startswith(prefix))
            found = TimedMap(outcome.result, outcome.seconds / outcome.shared_by, "; ".join(warnings))
            service.cache_map(question, missing[label], seed, found)
            if outcome.shared_by == 1:
                service.seconds[label] = round(outcome.seconds, 3)
            add(label, found)

    target = question.index if question.against is None else (question.index, question.against)
    quick_first = sorted(missing.values(), key=lambda one: not is_quick(one))
    with collect_warnings() as said:
        explain_each(
            question.vit,
            question.image.tensor,
            quick_first,
            target,
            seed=seed,
            catch=PatchlightError,
            finished=finished,
        )
    if not maps:
        raise PatchlightError(next(iter(job.status.failures.values())))
    return maps


def _map_result(label: str, found: TimedMap) -> schemas.MapResult:
    """A map by the name that was asked for: another name of the method may have made it."""
    att = found.attribution
    return schemas.MapResult(
        method=label,
        scores=att.scores[0].tolist(),
        error=None if att.error is None else att.error[0].tolist(),
        level=att.level,
        target=int(att.target[0]),
        target_label=att.target_names[0],
        against=None if att.against is None else int(att.against[0]),
        against_label=att.against_names[0] if att.against_names else None,
        settings={key: value for key, value in att.settings.items() if key not in ("chunk", "precision", "compile")},
        seed=att.seed,
        seconds=round(found.seconds, 3),
        warning=found.warning,
    )


def measure(given: JobInput[schemas.MeasureRequest], job: RunningJob) -> None:
    """Deletion and insertion of methods' maps, and of random orders, told one by one."""
    question, request = given.question, given.request
    trial = given.service.trial(question, request)
    maps = explain(given, job)
    random = trial.random
    result = schemas.MeasureResult(
        fractions=[round(float(n) / float(trial.removed[-1]), 6) for n in trial.removed],
        removed=trial.removed.tolist(),
        quantity=trial.quantity,
        random=schemas.RandomOrders(
            count=request.randoms,
            curve=_mean_curve(random),
            low=float(random.scores.min()),
            high=float(random.scores.max()),
            scores=random.scores.tolist(),
        ),
        methods=[],
    )
    job.status.measured = result
    job.tell("random", result.model_dump_json(exclude={"methods"}))
    for name, att in maps.items():
        truth = trial.of(on_grid(att.scores, question.vit)[0])
        found = schemas.FaithfulnessResult(
            method=name,
            order=truth.curves.orders[0].tolist(),
            curve=_mean_curve(truth.curves),
            predictions=question.predictions(truth.curves.logits[0], 5),
            beaten=truth.beaten,
            better=truth.better,
            words=truth.words,
        )
        if request.sanity:
            found.sanity, found.sanity_words = _sanity(question, att, request.seed)
        result.methods.append(found)
        job.tell("truth", found.model_dump_json())


def _sanity(question: ResolvedQuestion, att: Attribution, seed: int) -> tuple[float | None, str]:
    """The similarity of a map to those of the model with its layers randomised."""
    try:
        with collect_warnings():
            found = evaluate(
                question.vit, question.image.tensor, att, "randomisation", seed=seed, progress=False, current=True
            )
    except PatchlightError as error:
        return None, describe_error(error)
    value = float(found.values[0])
    return schemas.digits(value), sanity_words(value)


def _mean_curve(curves: Curves) -> schemas.RemovalCurve:
    """The mean over orders of removal, of which there may be one."""
    return schemas.RemovalCurve(
        insertion=curves.insertion.mean(0).tolist(),
        deletion=curves.deletion.mean(0).tolist(),
        insertion_area=float(curves.insertion_areas.mean()),
        deletion_area=float(curves.deletion_areas.mean()),
        score=float(curves.scores.mean()),
    )


def inside(service: ModelService, request: schemas.Question) -> schemas.InsideResult:
    """Attention to each patch block by block, and what the head makes of the tokens after each block."""
    question = service.resolve_question(request)
    vit = question.vit
    class_token = vit.prefix > 0 and vit.pooling not in ("avg", "max", "map")
    attention, no_attention = _attention(question, class_token)
    lens, no_lens = _lens(question)
    return schemas.InsideResult(
        attention=attention,
        attention_reason=no_attention,
        reads="of the class token" if class_token else "the mean of all patches",
        lens=lens,
        lens_reason=no_lens,
        quantity=quantity_of(vit),
    )


def _attention(question: ResolvedQuestion, class_token: bool) -> tuple[list[list[float | None]] | None, str]:
    vit = question.vit
    if vit.attention is not None:
        return None, f"the attention of {vit.name} cannot be read: {vit.attention}"
    if vit.hierarchical or vit.depth == 0:
        return None, f"the stages of {vit.name} have several grids, so no row of attention reaches over all blocks"

    def row(evidence: Evidence) -> Tensor:
        heads = evidence.A.mean(1)
        return heads[:, 0] if class_token else heads[:, vit.prefix :].mean(1)

    job = LayerJob(row, frozenset("A"), tuple(range(vit.depth)), "attention")
    seen = run_pass(vit, question.image.tensor, question.targets, jobs=[job])
    return [vit.patches(seen.at(layer)).flatten(1)[0].tolist() for layer in range(vit.depth)], ""


def _lens(question: ResolvedQuestion) -> tuple[list[schemas.BlockResult] | None, str]:
    """What the readout says of the tokens after each block."""
    vit = question.vit
    if vit.hierarchical or vit.depth == 0:
        return None, f"the head of {vit.name} reads its last stage alone"
    logits = []
    with torch.inference_mode(False), torch.no_grad(), vit.steady():
        tokens = vit.embed(question.image.tensor)
        for index in range(vit.depth):
            tokens = vit.block(index, vit.merge(index, tokens))
            logits.append(vit.readout(tokens).float().cpu())
    found = enumerate(question.predictions(torch.cat(logits), 3))
    return [schemas.BlockResult(block=i, predictions=one.predictions, asked=one.asked) for i, one in found], ""

"""The computation behind each request: functions of a model service and a request, without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from patchlight.study.faithfulness import Curves, Faithfulness, rank_results, sanity_words
from patchlight.study.run import Outcome, explain_each
from patchlight.web import schemas
from patchlight.web.asking import share_inside
from patchlight.web.jobs import RunningJob, describe_error
from patchlight.web.service import JobInput, ModelService, ResolvedQuestion, TimedMap, is_quick, quantity_of


def predict(service: ModelService, request: schemas.PredictRequest) -> schemas.PredictResult:
    question = service.resolve_question(request)
    return question.predictions(question.logits, request.most)[0]


def ablate(service: ModelService, request: schemas.AblateRequest) -> schemas.AblateResult:
    """The predictions for variants of the image, each with some patches hidden."""
    question = service.resolve_question(request)
    vit, image = question.vit, question.image.tensor
    shown = torch.ones(len(request.removed), vit.cells)
    for v, patches in enumerate(request.removed):
        if patches and max(patches) >= vit.cells:
            raise PatchlightError(f"Patch {max(patches)} does not exist; patches are 0 to {vit.cells - 1}.")
        shown[v, patches] = 0
    ablation = Ablation(vit, image, service.chunk, fine=True)
    if request.unit == "patch":
        owner = torch.zeros(len(shown), dtype=torch.long)
        fill = fill_images(request.fill, image, vit)
        logits = ablation.logits(PixelMasks(owner, shown.view(-1, *vit.grid), fill))
    else:
        check_tokens(vit, remaining=int(shown.sum(1).min()))
        logits = ablation.logits([TokenSubsets(torch.zeros(1, dtype=torch.long), row.nonzero().T) for row in shown])
    whole, *variants = question.predictions(torch.cat([question.logits, logits.float().cpu()]), request.most)
    return schemas.AblateResult(whole=whole, variants=variants)


def find_maps(
    job: JobInput[Any], report: Callable[[str, TimedMap | str], None] = lambda label, outcome: None
) -> dict[str, Attribution]:
    """The maps by name, cached ones first; `report` gets each map, or the reason why there is none."""
    service, question, seed = job.service, job.question, job.request.seed
    maps: dict[str, Attribution] = {}
    reasons: list[str] = []
    missing: dict[str, Request] = {}

    def add(label: str, outcome: TimedMap | str) -> None:
        if isinstance(outcome, str):
            reasons.append(outcome)
        else:
            maps[label] = outcome.attribution
        report(label, outcome)

    for name, method in job.methods.items():
        if isinstance(method, PatchlightError):
            add(name, describe_error(method))
            continue
        with service.lock:
            cached = service.maps.get(job.map_key(name))
        if cached is None:
            missing[name] = method
        else:
            add(name, cached)

    def finished(outcomes: Mapping[str, Outcome[Attribution]]) -> None:
        for label, outcome in outcomes.items():
            if outcome.result is None:
                add(label, outcome.error)
                continue
            prefix = f"{missing[label].name}: "
            warnings = dict.fromkeys(words.removeprefix(prefix) for words in collected if words.startswith(prefix))
            timed = TimedMap(outcome.result, outcome.seconds / outcome.shared_by, "; ".join(warnings))
            with service.lock:
                service.maps[job.map_key(label)] = timed
            if outcome.shared_by == 1:
                service.seconds[missing[label].name] = round(outcome.seconds, 3)
            add(label, timed)

    target = question.index if question.against is None else (question.index, question.against)
    requests = sorted(missing.values(), key=lambda request: not is_quick(request))
    image = question.image.tensor
    with collect_warnings() as collected:
        explain_each(question.vit, image, requests, target, seed=seed, catch=PatchlightError, finished=finished)
    if not maps:
        raise PatchlightError(reasons[0])
    return maps


def explain(job: JobInput[Any], running: RunningJob) -> dict[str, Attribution]:
    """The maps by name; each becomes an event of the job as soon as it is finished, like a reason for a missing one."""

    def report(label: str, outcome: TimedMap | str) -> None:
        if isinstance(outcome, str):
            running.status.failures[label] = outcome
            running.emit("job")
        else:
            running.status.maps.append(_map_result(label, outcome, job.question))
            running.emit("map", running.status.maps[-1].model_dump_json())

    return find_maps(job, report)


def hide(job: JobInput[schemas.HideRequest]) -> schemas.HideResult:
    """The effect of hiding the strongest patches of a map."""
    question, request = job.question, job.request
    (att,) = find_maps(job).values()
    test = schemas.MeasureRequest(**request.model_dump())
    trial = job.service.trial(question, test)
    hiding, order = trial.hide(on_grid(att.scores, question.vit)[0])
    facts = {key: getattr(hiding, key) for key in ("before", "after", "random_after", "words")}
    return schemas.HideResult(method=att.method, order=order, quantity=trial.quantity_words, **facts)


def _map_result(label: str, timed: TimedMap, question: ResolvedQuestion) -> schemas.MapResult:
    """A map under the name of the request, which may be an alias or "auto"."""
    att = timed.attribution
    return schemas.MapResult(
        method=label,
        made_by=att.method,
        **{key: getattr(att, key) for key in ("ignores_class", "level", "seed")},
        scores=att.scores[0].tolist(),
        error=None if att.error is None else att.error[0].tolist(),
        target=int(att.target[0]),
        target_label=att.target_names[0],
        against=None if att.against is None else int(att.against[0]),
        against_label=att.against_names[0] if att.against_names else None,
        inside=share_inside(question, att),
        settings={key: value for key, value in att.settings.items() if key not in ("chunk", "precision", "compile")},
        seconds=round(timed.seconds, 3),
        warning=timed.warning,
    )


def measure(job: JobInput[schemas.MeasureRequest], running: RunningJob) -> None:
    """The faithfulness test of the methods' maps; each result is an event, and ranks follow when all are tested."""
    question, request = job.question, job.request
    trial = job.service.trial(question, request)
    maps = explain(job, running)
    measured = schemas.MeasureResult(
        fractions=[round(float(n) / float(trial.removed[-1]), 6) for n in trial.removed],
        removed=trial.removed.tolist(),
        quantity=trial.quantity,
        quantity_words=trial.quantity_words,
        random=_random_orders(trial.random),
        methods=[],
    )
    running.status.measured = measured
    running.emit("random", measured.model_dump_json(exclude={"methods"}))
    results: dict[str, Faithfulness] = {}
    for name, att in maps.items():
        result = results[name] = job.service.test_result(job, name, att)
        answer = schemas.FaithfulnessResult(
            method=name,
            order=result.curves.orders[0].tolist(),
            curve=_mean_curve(result.curves),
            predictions=question.predictions(result.curves.logits[0], 5),
            **{key: getattr(result, key) for key in ("beaten", "better", "effect", "rank", "words")},
        )
        if request.sanity:
            answer.sanity, answer.sanity_words = _sanity(question, att, request.seed)
        measured.methods.append(answer)
        running.emit("result", answer.model_dump_json())
    for answer, ranked in zip(measured.methods, rank_results(results).values(), strict=True):
        answer.rank, answer.words = ranked.rank, ranked.words


def _sanity(question: ResolvedQuestion, att: Attribution, seed: int) -> tuple[float | None, str]:
    """The similarity of a map to the maps of the model with randomised layers, and its words."""
    try:
        with collect_warnings():
            evaluation = evaluate(
                question.vit, question.image.tensor, att, "randomisation", seed=seed, progress=False, current=True
            )
    except PatchlightError as error:
        return None, describe_error(error)
    value = float(evaluation.values[0])
    return schemas.digits(value), sanity_words(value)


def _random_orders(curves: Curves) -> schemas.RandomOrders:
    scores = curves.scores.tolist()
    low, high = min(scores), max(scores)
    return schemas.RandomOrders(count=len(scores), curve=_mean_curve(curves), low=low, high=high, scores=scores)


def _mean_curve(curves: Curves) -> schemas.RemovalCurve:
    """The mean curves over one or several orders."""
    return schemas.RemovalCurve(
        insertion=curves.insertion.mean(0).tolist(),
        deletion=curves.deletion.mean(0).tolist(),
        insertion_area=float(curves.insertion_areas.mean()),
        deletion_area=float(curves.deletion_areas.mean()),
        score=float(curves.scores.mean()),
    )


def inside(service: ModelService, request: schemas.AskedQuestion) -> schemas.InsideResult:
    """Attention to each patch in each block, and the prediction if the model ended after each block."""
    question = service.resolve_question(request)
    vit = question.vit
    class_token = vit.prefix > 0 and vit.pooling not in ("avg", "max", "map", "gradient")
    fields = ("attention", "attention_reason", "lens", "lens_reason")
    values: dict[str, Any] = dict(zip(fields, (*_attention(question, class_token), *_lens(question)), strict=True))
    reads = "from the class token" if class_token else "from all patches on average"
    return schemas.InsideResult(**values, reads=reads, quantity=quantity_of(vit))


def _attention(question: ResolvedQuestion, class_token: bool) -> tuple[list[list[float | None]] | None, str]:
    vit = question.vit
    if vit.attention is not None:
        return None, f"The attention of {vit.name} cannot be read: {vit.attention}."
    if vit.hierarchical or vit.depth == 0:
        return None, f"The stages of {vit.name} have different grids, so attention cannot be compared across blocks."

    def row(evidence: Evidence) -> Tensor:
        heads = evidence.A.mean(1)
        return heads[:, 0] if class_token else heads[:, evidence.cells].mean(1)

    job = LayerJob(row, frozenset("A"), tuple(range(vit.depth)), "attention")
    seen = run_pass(vit, question.image.tensor, question.targets, jobs=[job])
    return [vit.patches(seen.at(layer)).flatten(1)[0].tolist() for layer in range(vit.depth)], ""


def _lens(question: ResolvedQuestion) -> tuple[list[schemas.BlockResult] | None, str]:
    """The predictions of the readout for the tokens after each block."""
    vit = question.vit
    if vit.hierarchical or vit.depth == 0:
        return None, f"The head of {vit.name} reads only its last stage."
    if len(vit.reads) > 1:
        return None, f"{vit.name} reads the tokens of several blocks, so it cannot end after one of them."
    logits = []
    with torch.inference_mode(False), torch.no_grad(), vit.steady():
        tokens = vit.embed(question.image.tensor)
        for index in range(vit.depth):
            tokens = vit.block(index, vit.merge(index, tokens))
            logits.append(vit.readout(tokens).float().cpu())
    answers = enumerate(question.predictions(torch.cat(logits), 3))
    return [schemas.BlockResult(block=i, predictions=each.predictions, asked=each.asked) for i, each in answers], ""

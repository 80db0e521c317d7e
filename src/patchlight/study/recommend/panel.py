"""What takes part in a race: methods that work on the model, at settings that fit the time, and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Selection, resolve_all
from patchlight.methods.base import METHODS
from patchlight.methods.requests import Request, refusal, resolve
from patchlight.metrics.base import MetricRequest, resolve_metric
from patchlight.study.cost import duration, explain_forwards

RANDOM = "random"
AGREEMENT = "agreement"
"""Not a metric of maps: how far two seeds of a method that draws agree."""
FIRST = (
    *(RANDOM, "genatt", "decompx.plus", "posterior", "attcat.libra", "decompx.skipplus", "tis", "tokentm"),
    *("fullgrad-plus.libra", "ixg.plus.libra", "transatt", "legrad", "rollout", "gradcam", "rawatt", "vit-cx"),
    *("vit-shapley", "diffmask", "kernel-shap", "occlusion", "lrp", "grad-eclip", "ig", "attcat", "ixg.plus"),
)
"""Where time is short, these come first: what docs/results calls good, the usual baselines, and the compositions that
are worth having. All other registered methods follow."""
FEWEST_SAMPLES = {
    **{"posterior": 32, "tis": 64, "kernel-shap": 250, "rise": 500, "lime": 250, "hsic": 384, "smoothgrad": 10},
    **{"ig": 10, "bt-h": 10, "bt-t": 10, "tam": 10},
}
"""Of methods that sample: with fewer their map is mostly noise, and they are left out instead."""
MOST_SAMPLES = {"posterior": 1024}
"""Of methods that gain by more than their default."""
FORWARDS = 10_000
"""Forwards that a budget must pay for, if the deciding metric is to have all its steps."""
SHARE = 0.06
"""Of the budget, what the maps of one method that samples may take on the first 24 images."""
FILLS = {"zero": "zero", "blur": "blur-tis"}
"""What stands where patches are removed, for the deciding metric: the data's mean colour, and a blur that leaves the
rough shapes. A map should be right under both."""
Spec = dict[str, Any]
"""A method or metric by its name and the settings that are not its defaults, as `explain` and `evaluate` take it."""


@dataclass(frozen=True)
class Panel:
    """What takes part in a race: methods and metrics by label. The mean of the `deciding` metrics is a map's score.

    `agreement`: whether it is measured how far two seeds of a sampling method agree.
    """

    metrics: Mapping[str, MetricRequest]
    deciding: tuple[str, ...]
    agreement: bool
    methods: Mapping[str, Request] = field(default_factory=dict)

    def sign(self, label: str) -> int:
        """-1 where lower is better."""
        metric = self.metrics.get(label)
        return 1 if metric is None or metric.metric.rises(metric.settings) else -1


def choose_metrics(asked: Selection | None, vit: Anatomy, affordable: float = math.inf) -> Panel:
    """The metrics named, of which the first decides; by default SRG over two fills, and the others where they exist.

    If only few forward passes are `affordable`, SRG is measured in fewer steps.
    """
    if asked is not None:
        requests = resolve_all(asked, {}, MetricRequest, "metric", resolve_metric)
        needing = next((r for r in requests if r.metric.needs), None)
        if needing is not None:
            needs = " and ".join(sorted(needing.metric.needs))
            raise PatchlightError(f"'{needing.label}' needs {needs}; `recommend` uses metrics that need none, as srg")
        return Panel({r.label: r.suited(vit) for r in requests}, (requests[0].label,), agreement=False)
    cells = vit.grid[0] * vit.grid[1]
    wanted = (8, 7, 9, 6, 10) if affordable > FORWARDS else (4, 5, 3)
    steps = next((s for s in wanted if cells % s == 0), min(wanted[0], cells))
    named: dict[str, Spec] = {
        **{f"srg {word}": {"metric": "srg", "steps": steps, "fill": fill} for word, fill in FILLS.items()},
        "token-deletion": {"quantity": "aopc", "points": 5, "target_class": "prediction"},
        "saco": {"ties": "neutral"},
        "randomisation": {},
        "max-sensitivity": {"samples": 3},
    }
    if vit.can_drop is not None:
        del named["token-deletion"]
    deciding = tuple(label for label in named if label.startswith("srg "))
    metrics: dict[str, MetricRequest] = {}
    for label, settings in named.items():
        try:
            metrics[label] = resolve_metric(label, settings).suited(vit)
        except PatchlightError:
            if label in deciding:
                raise
    return Panel(metrics, deciding, agreement=True)


def choose_methods(asked: Selection | None, vit: Anatomy) -> tuple[dict[str, Request], dict[str, str]]:
    """The methods by label in order of worth, `random` among them, and why others cannot take part.

    Those that were named must all be known; those of them that do not work on the model are left out.
    """
    if asked is None:
        names = [*FIRST, *sorted(set(METHODS) - set(FIRST))]
        requests = [resolve(name) for name in names if name.split(".")[0] in METHODS]
    else:
        requests = resolve_all(asked, {}, Request, "method", resolve)
        if not any(request.name == RANDOM for request in requests):
            requests = [resolve(RANDOM), *requests]
    custom = next((request.label for request in requests if callable(request.score)), None)
    if custom is not None:
        raise PatchlightError(
            f"'{custom}' has a callable as score, which a verdict cannot write down; name a score instead, as 'logit'"
        )
    reasons = {request.label: refusal(request.suited(vit), vit) for request in requests}
    works = {r.label: r.suited(vit) for r in requests if reasons[r.label] is None}
    left_out = {label: reason for label, reason in reasons.items() if reason is not None}
    if all(request.name == RANDOM for request in works.values()):
        told = "; ".join(f"{label}: {reason}" for label, reason in left_out.items()) or "none was named but random"
        raise PatchlightError(f"no method can be compared with random on {vit.name}: {told}")
    return works, left_out


def affordable_methods(
    works: Mapping[str, Request], forward: float, allowed: float
) -> tuple[dict[str, Request], dict[str, str]]:
    """Methods at settings for which a map takes at most `allowed` seconds, and why others are left out.

    `forward` is the time of one forward pass in seconds.
    """
    fitting: dict[str, Request] = {}
    left_out: dict[str, str] = {}
    for label, request in works.items():
        fewer = sampled(request, forward, allowed)
        if isinstance(fewer, str):
            left_out[label] = f"{fewer}, too long for this budget"
        else:
            fitting[fewer.label] = fewer
    return fitting, left_out


def sampled(request: Request, seconds: float, allowed: float) -> Request | str:
    """The same with as many samples as `allowed` seconds an image buy, at `seconds` a forward; or why that is too few.

    The label says what it comes to, where that is not the method's default.
    """
    setting = "samples" if "samples" in request.settings else "steps"
    base = request.name.split(".")[0]
    least = FEWEST_SAMPLES.get(base)
    if least is None or setting not in request.settings:
        return request
    own = int(request.settings[setting])
    most = max(own, MOST_SAMPLES.get(base, 0))
    each = seconds * explain_forwards(request) / own
    if own == most and each * own <= allowed:
        return request
    if each * least > allowed:
        return f"one map would take about {duration(each * least)} even with only {least} {setting}"
    count = least
    while 2 * count * each <= allowed and 2 * count <= most:
        count *= 2
    if count == own:
        return request
    label = f"{request.label}({setting}={count})"
    return replace(request, label=label, settings={**request.settings, setting: count})


def method_spec(request: Request) -> Spec:
    """A method by name and settings that differ from its defaults."""
    usual = resolve(request.name)
    settings = {k: v for k, v in request.settings.items() if k not in usual.settings or v != usual.settings[k]}
    score = {"score": request.score} if request.chosen_score or request.score != usual.score else {}
    return {"method": request.name, **score, **settings}


def metric_spec(request: MetricRequest) -> Spec:
    """A metric by name and settings that differ from its defaults."""
    defaults = resolve_metric(request.metric.name).settings
    return {"metric": request.metric.name, **{k: v for k, v in request.settings.items() if v != defaults[k]}}

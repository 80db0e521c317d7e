"""The methods and metrics of a race, with settings that fit the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.text import duration
from patchlight.methods.base import METHODS
from patchlight.methods.requests import Request, refusal, resolve
from patchlight.metrics.base import MetricRequest, resolve_metric
from patchlight.study.cost import explain_forwards

RANDOM = "random"
AGREEMENT = "agreement"
"""The agreement of two seeds of a sampling method; not a metric of maps."""
FIRST = (
    *(RANDOM, "genatt", "decompx.plus", "posterior", "attcat.libra", "decompx.skipplus", "tis", "tokentm"),
    *("fullgrad-plus.libra", "ixg.plus.libra", "transatt", "legrad", "rollout", "gradcam", "rawatt", "vit-cx"),
    *("vit-shapley", "diffmask", "kernel-shap", "occlusion", "lrp", "grad-eclip", "ig", "attcat", "ixg.plus"),
)
"""The first methods if time is short: good ones according to docs/results, the usual baselines, and compositions. All
other registered methods follow."""
FEWEST_SAMPLES = {
    **{"posterior": 32, "tis": 64, "kernel-shap": 250, "rise": 500, "lime": 250, "hsic": 384, "smoothgrad": 10},
    **{"ig": 10, "bt-h": 10, "bt-t": 10, "tam": 10},
}
"""The smallest number of samples. With fewer, a map is mostly noise, and the method is left out."""
MOST_SAMPLES = {"posterior": 1024}
"""The largest number of samples of methods that improve beyond their default number."""
FORWARDS = 10_000
"""The deciding metric has its full number of steps if the budget allows more forward passes than this."""
SHARE = 0.06
"""Share of the budget for the maps of one sampling method on the first 24 images."""
FILLS = {"zero": "zero", "blur": "blur-tis"}
"""The fills of the deciding metric: the mean colour of the data, and a blur that keeps rough shapes."""
Spec = dict[str, Any]
"""The name of a method or metric and the settings that differ from its defaults, as in `explain` and `evaluate`."""


@dataclass(frozen=True)
class Panel:
    """The methods and metrics of a race by label.

    Attributes:
        metrics: The metrics.
        deciding: The metrics whose mean is the score of a map.
        agreement: Whether the agreement of two seeds of sampling methods is measured.
        methods: The methods.
    """

    metrics: Mapping[str, MetricRequest]
    deciding: tuple[str, ...]
    agreement: bool
    methods: Mapping[str, Request] = field(default_factory=dict)

    def sign(self, label: str) -> int:
        """-1 if lower is better, else 1."""
        metric = self.metrics.get(label)
        return 1 if metric is None or metric.metric.rises(metric.settings) else -1


def choose_metrics(selection: Selection | None, vit: Anatomy, affordable: float = math.inf) -> Panel:
    """The metrics of a race.

    The first of the user's metrics decides. By default, SRG over two fills decides, and others are reported if they
    work on the model. SRG has fewer steps if only few forward passes are `affordable` within the budget.
    """
    if selection is not None:
        requests = resolve_all(selection, {}, MetricRequest, "metric", resolve_metric)
        needing = next((r for r in requests if r.metric.needs), None)
        if needing is not None:
            needs = " and ".join(sorted(needing.metric.needs))
            raise PatchlightError(f"'{needing.label}' needs {needs}; `recommend` uses other metrics, such as srg")
        return Panel({r.label: r.suited(vit) for r in requests}, (requests[0].label,), agreement=False)
    cells = vit.cells
    preferred = (8, 7, 9, 6, 10) if affordable > FORWARDS else (4, 5, 3)
    steps = next((s for s in preferred if cells % s == 0), min(preferred[0], cells))
    specs: dict[str, Spec] = {
        **{f"srg {word}": {"metric": "srg", "steps": steps, "fill": fill} for word, fill in FILLS.items()},
        "token-deletion": {"quantity": "aopc", "points": 5, "target_class": "prediction"},
        "saco": {"ties": "neutral"},
        "randomisation": {},
        "max-sensitivity": {"samples": 3},
    }
    if vit.can_drop is not None:
        del specs["token-deletion"]
    deciding = tuple(label for label in specs if label.startswith("srg "))
    metrics: dict[str, MetricRequest] = {}
    for label, settings in specs.items():
        try:
            metrics[label] = resolve_metric(label, settings).suited(vit)
        except PatchlightError:
            if label in deciding:
                raise
    return Panel(metrics, deciding, agreement=True)


def choose_methods(selection: Selection | None, vit: Anatomy) -> tuple[dict[str, Request], dict[str, str]]:
    """The methods of a race by label, most promising first and with `random`, and why others do not work."""
    if selection is None:
        names = [*FIRST, *sorted(set(METHODS) - set(FIRST))]
        requests = [resolve(name) for name in names if name.split(".")[0] in METHODS]
    else:
        requests = resolve_all(selection, {}, Request, "method", resolve)
        if not any(request.name == RANDOM for request in requests):
            requests = [resolve(RANDOM), *requests]
    custom = next((request.label for request in requests if callable(request.score)), None)
    if custom is not None:
        raise PatchlightError(
            f"'{custom}' has a function as score, which a verdict cannot record; give a named score such as 'logit'"
        )
    labels = {request.label for request in requests}
    suited = [(request, request.suited(vit)) for request in requests]
    requests = [  # "auto" gets the name of the method that it chose, so that a verdict names that method
        replace(r, label=r.name) if request.choices and request.label == "auto" and r.name not in labels else r
        for request, r in suited
    ]
    reasons = {request.label: refusal(request, vit) for request in requests}
    works = {r.label: r for r in requests if reasons[r.label] is None}
    left_out = {label: reason for label, reason in reasons.items() if reason is not None}
    if all(request.name == RANDOM for request in works.values()):
        reasons_given = "; ".join(f"{label}: {reason}" for label, reason in left_out.items())
        raise PatchlightError(
            f"no method can be compared with random on {vit.name}: {reasons_given or 'only random was named'}"
        )
    return works, left_out


def affordable_methods(
    works: Mapping[str, Request], forward: float, allowed: float
) -> tuple[dict[str, Request], dict[str, str]]:
    """Methods with settings for which a map takes at most `allowed` seconds, and why others are left out."""
    fitting: dict[str, Request] = {}
    left_out: dict[str, str] = {}
    for label, request in works.items():
        fewer = fit_samples(request, forward, allowed)
        if isinstance(fewer, str):
            left_out[label] = f"{fewer}, too long for this budget"
        else:
            fitting[fewer.label] = fewer
    return fitting, left_out


def fit_samples(request: Request, seconds: float, allowed: float) -> Request | str:
    """Set the number of samples of a method to what fits into `allowed` seconds, or return why that is too few.

    `seconds` is the time of a forward pass. The label contains the number of samples if it is not the default.
    """
    setting = "samples" if "samples" in request.settings else "steps"
    base = request.name.split(".")[0]
    least = FEWEST_SAMPLES.get(base)
    if least is None or setting not in request.settings:
        return request
    default = int(request.settings[setting])
    most = max(default, MOST_SAMPLES.get(base, 0))
    each = seconds * explain_forwards(request) / default
    if default == most and each * default <= allowed:
        return request
    if each * least > allowed:
        return f"one map would take about {duration(each * least)} even with only {least} {setting}"
    count = least
    while 2 * count * each <= allowed and 2 * count <= most:
        count *= 2
    if count == default:
        return request
    label = f"{request.label}({setting}={count})"
    return replace(request, label=label, settings={**request.settings, setting: count})


def method_spec(request: Request) -> Spec:
    """The name of a method and the settings that differ from its defaults."""
    usual = resolve(request.name)
    settings = {k: v for k, v in request.settings.items() if k not in usual.settings or v != usual.settings[k]}
    score = {"score": request.score} if request.chosen_score or request.score != usual.score else {}
    return {"method": request.name, **score, **settings}


def metric_spec(request: MetricRequest) -> Spec:
    """The name of a metric and the settings that differ from its defaults."""
    defaults = resolve_metric(request.metric.name).settings
    return {"metric": request.metric.name, **{k: v for k, v in request.settings.items() if v != defaults[k]}}

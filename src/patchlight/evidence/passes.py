"""The trace: one tapped forward, and one backward per explained class, give all white-box evidence about an image.

`run_pass` computes many layer maps in one pass, each inside the pass and as soon as its evidence is complete, so that
nothing larger than the maps is kept. `trace` hands the raw evidence to people who invent methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy
from patchlight.errors import PatchlightError, Unsupported, nearest
from patchlight.evidence.rules import RULES, Rule
from patchlight.evidence.taps import Evidence, Taps
from patchlight.targets import Score, Target, Targets, predicted, resolve_targets, score_of

PIXELS = -1
"""The layer index of the image itself: its evidence has x = image and g = gradient, as [B,H,W,C]."""

BACKWARD = frozenset({"g", "gy", "gn", "G", "bias"})
TAPPED = frozenset({"A", "G", "v", "n", "gn", "u", "bias"})
EVIDENCE = frozenset({"x", "y", "A", "v", "n", "u", "p"}) | BACKWARD


@dataclass(frozen=True)
class LayerJob:
    """A function of the evidence of one block, wanted at some blocks (or at PIXELS)."""

    function: Callable[[Evidence], Any]
    needs: frozenset[str]
    layers: tuple[int, ...]

    @property
    def backward(self) -> bool:
        return bool(self.needs & BACKWARD)


@dataclass
class Pass:
    """What a pass gives: logits [B,C], the explained scores [B,T], and `values[t][j]`, job j's values by layer.

    `end[t]` holds the bias terms behind the last block (the final norm's per token, the head's as a scalar); `pool`
    the attention of an attention-pooling head.
    """

    logits: Tensor
    targets: Targets
    scores: Tensor
    values: list[list[dict[int, Any]]]
    end: list[Evidence]
    pool: Tensor | None = None


def run_pass(
    vit: Anatomy,
    images: Tensor,
    targets: Targets | None = None,
    score: Score = "logit",
    rule: Rule = RULES["plain"],
    jobs: Sequence[LayerJob] = (),
    tokens: Tensor | None = None,
) -> Pass:
    """One forward over `images` and one backward per class, all `jobs` done on the way.

    `tokens` [B,N,D] enter block 0 in place of the embedded images, where given. Blocks below the first layer that a
    backward job wants run without a graph; with no backward job there is no backward at all.
    """
    vit = vit.wide()
    with torch.inference_mode(False), vit.steady():
        runner = _Runner(vit, rule, jobs)
        logits = runner.forward(_usable(images, vit), None if tokens is None else _usable(tokens, vit))
        targets = predicted(logits) if targets is None else targets.repeat(1)
        with torch.set_grad_enabled(runner.backward):
            scores = score_of(logits, targets, score, vit.sigmoid)
        values, ends = [], []
        for t in range(targets.count):
            done, end = runner.explain(scores[:, t], last=t == targets.count - 1)
            values.append(done)
            ends.append(end)
    return Pass(logits.detach(), targets, scores.detach(), values, ends, runner.end.A)


def _usable(given: Tensor, vit: Anatomy) -> Tensor:
    """In the type of the pass, and no inference tensor."""
    return (given.clone() if given.is_inference() else given).to(vit.dtype)


class _Runner:
    """The state of one pass: evidence by layer, and the values of the class being explained."""

    def __init__(self, vit: Anatomy, rule: Rule, jobs: Sequence[LayerJob]) -> None:
        self.vit, self.rule, self.jobs = vit, rule, jobs
        self.backward = any(job.backward for job in jobs)
        self.first = min((min(job.layers) for job in jobs if job.backward), default=vit.depth)
        self.wants = {k: [j for j, job in enumerate(jobs) if k in job.layers] for k in range(PIXELS, max(vit.depth, 1))}
        self.evidence: dict[int, Evidence] = {}
        self.values: list[dict[int, Any]] = [{} for _ in jobs]
        self.finished: set[int] = set()
        self.closing = False
        self.leaf = torch.empty(0)
        self.end = Evidence(vit.depth, torch.empty(0))
        self.projected: Tensor = None  # type: ignore[assignment]

    def forward(self, images: Tensor, tokens: Tensor | None) -> Tensor:
        vit = self.vit
        pixels = self.backward and self.first == PIXELS
        x = self.leaf = images.detach().requires_grad_(pixels)
        self.evidence[PIXELS] = Evidence(PIXELS, x.detach().movedim(1, -1))
        with torch.set_grad_enabled(pixels), self._tapped(pixels, self.evidence[PIXELS], frozenset(), in_block=False):
            x = self._embed(x) if tokens is None else tokens
        for layer in range(vit.depth):
            graph = self.backward and layer >= self.first
            if graph and layer == self.first:
                x = self.leaf = x.detach().requires_grad_()
            elif graph:
                x.register_hook(self._hook(layer))
            needs = frozenset[str]().union(*(self.jobs[j].needs for j in self.wants[layer]))
            evidence = self.evidence[layer] = Evidence(
                layer,
                x.detach(),
                prefix=vit.prefix,
                depth=vit.depth,
                open_parts=partial(vit.parts, layer),
                p=self.projected,
            )
            with torch.set_grad_enabled(graph), self._tapped(graph, evidence, needs & TAPPED):
                x = vit.block(layer, x)
            evidence.y = x.detach()
            with torch.no_grad():
                for j in self.wants[layer]:
                    if not self.jobs[j].backward:
                        self.values[j][layer] = self.jobs[j].function(evidence)
            if not graph:
                del self.evidence[layer]
        if vit.depth == 0 and self.wants[0]:
            x = self._feature_map(x)
        needs = frozenset({"bias"} if any("bias" in job.needs for job in self.jobs) else ())
        needs |= {"A"} if vit.pooling == "map" else frozenset()
        self.end.x = x.detach()
        if self.backward:
            x.register_hook(self._hook(vit.depth))
        with torch.set_grad_enabled(self.backward), self._tapped(self.backward, self.end, needs, in_block=False):
            return vit.readout(x)

    def _feature_map(self, x: Tensor) -> Tensor:
        """A hierarchical model's tokens stand for the input of a block, which it has none of."""
        if self.backward and self.first == 0:
            x = self.leaf = x.detach().requires_grad_()
        evidence = self.evidence[0] = Evidence(0, x.detach(), prefix=self.vit.prefix)
        for j in self.wants[0]:
            if not self.jobs[j].backward:
                self.values[j][0] = self.jobs[j].function(evidence)
        return x

    def _embed(self, images: Tensor) -> Tensor:
        if not any("p" in job.needs for job in self.jobs):
            return self.vit.embed(images)

        def keep(patches: Tensor) -> None:
            self.projected = patches.detach().contiguous()

        with self.vit.projecting(keep):
            return self.vit.embed(images)

    def _tapped(
        self, graph: bool, evidence: Evidence, needs: frozenset[str], in_block: bool = True
    ) -> contextlib.AbstractContextManager[Any]:
        ruled = graph and self.rule.name != "plain"
        return Taps(self.rule, needs, evidence, in_block) if needs or ruled else contextlib.nullcontext()

    def _hook(self, layer: int) -> Callable[[Tensor], None]:
        def arrived(gradient: Tensor) -> None:
            self._gradient(layer, gradient)

        return arrived

    def _gradient(self, layer: int, gradient: Tensor) -> None:
        """The gradient of the tokens entering `layer`: the evidence of that layer is complete, so its jobs run."""
        if layer - 1 in self.evidence:
            self.evidence[layer - 1].gy = gradient
        if layer not in self.evidence or layer in self.finished:
            return
        self.finished.add(layer)
        evidence = self.evidence[layer]
        evidence.g = gradient
        _fill_missing(evidence)
        with torch.no_grad():
            for j in self.wants[layer]:
                if self.jobs[j].backward:
                    self.values[j][layer] = self.jobs[j].function(evidence)
        evidence.forget()
        if self.closing:
            del self.evidence[layer]

    def explain(self, scores: Tensor, last: bool) -> tuple[list[dict[int, Any]], Evidence]:
        """The backward of one class: its values by job and layer, and the bias terms behind the last block."""
        if not self.backward:
            return self.values, self.end
        if not scores.requires_grad:
            raise Unsupported(
                f"no gradient flows back through {self.vit.name}: a layer of it (quantised, or under no_grad) has "
                "none; methods that remove patches or mask pixels work"
            )
        self.finished, self.closing = set(), last
        self.values = [{} if job.backward else self.values[j] for j, job in enumerate(self.jobs)]
        try:
            (gradient,) = torch.autograd.grad(scores.sum(), self.leaf, retain_graph=not last, allow_unused=True)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise PatchlightError(
                f"the weights of {self.vit.name} were changed while it was explained; explain it between two steps of "
                "its training, or explain a copy"
            ) from error
        if gradient is None:
            gradient = torch.zeros_like(self.leaf)
        if self.first == PIXELS:
            gradient = gradient.movedim(1, -1)
        for layer in range(self.vit.depth, self.first, -1):
            if layer not in self.finished and layer in self.evidence:
                self._gradient(layer, torch.zeros_like(self.evidence[layer].x))
        self._gradient(self.first, gradient)
        end = Evidence(self.end.index, self.end.x, bias=self.end.bias, scalar_bias=self.end.scalar_bias)
        self.end.forget()
        return self.values, end


def _fill_missing(evidence: Evidence) -> None:
    """Gradients that never came are zero: the score does not depend on that tensor."""
    if evidence.gy is None:
        evidence.gy = torch.zeros_like(evidence.x)
    if evidence.gn is None and evidence.n is not None:
        evidence.gn = torch.zeros_like(evidence.n)
    if evidence.G is None and evidence.A is not None:
        evidence.G = torch.zeros_like(evidence.A)
    if evidence.bias is None:
        evidence.bias = evidence.x.new_zeros(evidence.x.shape[:2])


@dataclass
class Trace:
    """The evidence itself: `tokens` x_0..x_L, `gradients` g_0..g_L-1, `attention` A_l and `attention_gradients` G_l.

    Attention is [B,H,N,N] (to, from); `target` [B,1] and `scores` [B,1] say what was explained.
    """

    vit: Anatomy
    logits: Tensor
    target: Tensor
    scores: Tensor
    tokens: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)
    attention_gradients: list[Tensor] = field(default_factory=list)


@contextlib.contextmanager
def trace(
    vit: Anatomy | nn.Module,
    images: Any,
    target: Target = None,
    score: Score = "logit",
    rule: str = "plain",
) -> Iterator[Trace]:
    """Everything one forward and one backward see of a model (an Anatomy or a module), for people inventing methods.

    >>> with pl.trace(vit, images, target=281) as t:            # doctest: +SKIP
    ...     row = (t.attention[-1] * t.attention_gradients[-1]).relu().mean(1)[:, 0]
    """
    if rule not in RULES:
        raise PatchlightError(f"no backward rule is called '{rule}'; {nearest(rule, RULES)}")
    from patchlight.anatomy.load import wrap

    vit = wrap(vit)
    if vit.depth == 0:
        raise Unsupported(
            f"{vit.name} is opened as a feature map with no transformer blocks, so there is none to trace"
        )
    if vit.attention is not None:
        raise Unsupported(f"the attention of {vit.name} cannot be read: {vit.attention}")
    batch = vit.batch(images)
    targets = resolve_targets(target, len(batch), vit.classes, vit.labels)
    if targets is not None and targets.several:
        raise PatchlightError(f"a trace is of one class an image; {targets.count} were given for each")
    job = LayerJob(lambda e: (e.x, e.y, e.g, e.A, e.G), frozenset("xygAG"), tuple(range(vit.depth)))
    seen = run_pass(vit, batch, targets, score, RULES[rule], [job])
    layers = [seen.values[0][0][layer] for layer in range(vit.depth)]
    result = Trace(vit, seen.logits, seen.targets.index, seen.scores)
    result.tokens = [x for x, *_ in layers] + [layers[-1][1]]
    result.gradients = [g for _, _, g, _, _ in layers]
    result.attention = [a for *_, a, _ in layers]
    result.attention_gradients = [g for *_, g in layers]
    try:
        yield result
    finally:
        for kept in (result.tokens, result.gradients, result.attention, result.attention_gradients):
            kept.clear()

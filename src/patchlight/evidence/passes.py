"""The trace: one tapped forward, and one backward per explained class, give all white-box evidence about an image.

`run_pass` computes many layer maps in one pass, each inside the pass and as soon as its evidence is complete, so that
nothing larger than the maps is kept. `trace` hands the raw evidence to people who invent methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.windows import Merging
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.progress import watching
from patchlight.core.targets import Score, Target, Targets, predicted, resolve_targets, score_of
from patchlight.evidence.precision import HALF, Decided, casting, free_memory, lowered, rounding
from patchlight.evidence.record import BACKWARD, TAPPED, End, Evidence, Record
from patchlight.evidence.rows import has_tiles
from patchlight.evidence.rules import PLAIN, RULES, Rule
from patchlight.evidence.taps import Taps

PIXELS = -1
"""The layer index of the image itself: its evidence has x = image and g = gradient, as [B,H,W,C]."""
FEATURES = -2
"""The layer index of a hierarchical model's feature map, behind the stage it is opened at: x and g, and no block."""


def rows_at_once(vit: Anatomy) -> int:
    """How many variants of images one pass with a backward may hold: 16, and on CUDA what memory has room for."""
    return fitting(vit) if vit.device.type == "cuda" and vit.depth else 16


def fitting(vit: Anatomy, half: bool = False, written: bool = False) -> int:
    """How many images a pass with a backward may hold on CUDA, 1 to 256: what half of the free memory has room for.

    The backward reads about 40 numbers a token, channel and block, half as wide in half precision; and attention and
    its gradient, where they are `written`.
    """
    depth, wide = max(vit.depth, 1), vit.dtype.itemsize
    each = depth * vit.tokens * vit.width * 40 * wide // (2 if half else 1)
    each += 2 * depth * vit.heads * vit.tokens**2 * wide if written else 0
    return max(1, min(256, free_memory(vit.device) // 2 // each))


def in_memory(run: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """What `run` gives for rows [n,...], each by itself: in two halves where memory runs out."""
    try:
        return run(rows)
    except (torch.OutOfMemoryError, MemoryError):
        if len(rows) == 1:
            raise
    return torch.cat([in_memory(run, half) for half in rows.chunk(2)])


@dataclass(frozen=True)
class Course:
    """What a pass explains, where that is not the model's own score by its own blocks.

    `local`: every block has a score of its own, that of its output read in this way as if it were the last, and only
    its own attention's gradient is seen; `pooler`: the attention of the model's pooling, fed with that output, is seen
    in place of the block's. `one_head`: the last block attends with one head of the tokens' whole width.
    """

    local: Literal["pooling", "cls", "patches", "tokens"] | None = None
    pooler: bool = False
    one_head: bool = False


WHOLE = Course()
"""The model as it is, explained by its own score."""


@dataclass(frozen=True)
class LayerJob:
    """A function of the evidence of one block, of which it reads `needs`, wanted at some blocks, PIXELS or FEATURES."""

    function: Callable[[Evidence], Any]
    needs: frozenset[str]
    layers: tuple[int, ...]
    name: str = "this layer map"

    def of(self, record: Record) -> Any:
        return self.function(Evidence(record, self.needs, self.name))

    @property
    def backward(self) -> bool:
        return bool(self.needs & BACKWARD)


@dataclass(frozen=True)
class Pass:
    """What a pass gives: logits [B,C], the explained scores [B,T], and what its jobs computed.

    `found` has, for each class and job, the values by layer, and `ends` the bias terms behind the last block for each
    class; `layers`, `at` and `end` read them. `pool` is the attention of an attention-pooling head.
    """

    logits: Tensor
    targets: Targets
    scores: Tensor
    found: Sequence[Sequence[Mapping[int, Any]]]
    ends: Sequence[End] = (End(),)
    pool: Tensor | None = None
    last: Tensor | None = None
    """The tokens [B,N,D] that the head reads, where it reads tokens."""

    def layers(self, job: int = 0, target: int = 0) -> Mapping[int, Any]:
        """What the job gave for the explained class of that number, by layer."""
        return self.found[target][job]

    def at(self, layer: int, job: int = 0, target: int = 0) -> Any:
        """What the job gave at one layer."""
        return self.found[target][job][layer]

    def row(self, vit: Anatomy, target: int = 0) -> Tensor:
        """The weight [B,N] with which the explained class of number `target` reads each output token."""
        return vit.pool_row(self.logits, self.pool, self.last, self.targets.index[:, target])

    def end(self, target: int = 0) -> End:
        """The bias terms behind the last block."""
        return self.ends[target]


def run_pass(
    vit: Anatomy,
    images: Tensor,
    targets: Targets | None = None,
    score: Score = "logit",
    rule: Rule = PLAIN,
    jobs: Sequence[LayerJob] = (),
    tokens: Tensor | None = None,
    precision: Decided = "full",
    course: Course = WHOLE,
) -> Pass:
    """One forward over `images` and one backward per class, all `jobs` done on the way, on the course given.

    `tokens` [B,N,D] enter block 0 in place of the embedded images, where given. Blocks below the first layer that a
    backward job wants run without a graph; with no backward job there is no backward at all. In bf16 and fp16 the
    products of the embedding and the blocks are in such a type, the tokens between them and the readout are not, and on
    CUDA attention stays fused whoever looks at it.
    """
    watching().check()
    vit = vit.wide()
    runs = lowered(vit, precision, products=True)
    with torch.inference_mode(False), vit.steady(), runs.steady():
        runner = _runner_of(course)(vit, runs, rule, jobs, precision, course)
        rounds: Decided = "tf32" if precision == "tf32" else "full"  # what rounds in half precision does so by itself
        try:
            with rounding(vit, rounds):
                logits = runner.forward(_usable(images, vit), None if tokens is None else _usable(tokens, vit))
            if targets is None:
                targets = surely_predicted(vit, images, logits.detach(), precision)
            targets = targets.repeat(1)
            scores = runner.score(logits, targets, score)
            found, ends = [], []
            with rounding(vit, rounds):
                for t in range(targets.count):
                    done, end = runner.explain(t, last=t == targets.count - 1)
                    found.append(done)
                    ends.append(end)
        finally:
            runner.release()
    last = runner.end.x if vit.head is not None and vit.head.block is not None else None
    return Pass(logits.detach(), targets, scores.detach(), found, ends, runner.end.seen.get("A"), last)


def surely_predicted(vit: Anatomy, images: Tensor, logits: Tensor, precision: Decided) -> Targets:
    """The predicted classes; where rounding may have changed one, it is looked up in full."""
    found = predicted(logits, vit.outputs)
    if precision == "full" or vit.outcomes == 1:
        return found
    if logits.shape[1] == 1:  # label 1 against 0
        gap, limit = logits[:, 0].abs(), torch.tensor(0.25, device=logits.device)
    else:
        first, second = logits.topk(2, 1).values.unbind(1)
        gap, limit = first - second, _CLOSE * logits.abs().amax(1)
    close = (~(gap >= limit)).nonzero().flatten()  # and where the logits are lost
    if len(close):
        found.index[close.to(found.index.device)] = predicted(vit.logits(images[close]), vit.outputs).index
    return found


_CLOSE = 0.05
"""Two classes are close when their logits differ by less than this share of the largest; bf16 moves one by 0.01."""


def _usable(given: Tensor, vit: Anatomy) -> Tensor:
    """In the type of the pass, and no inference tensor."""
    return (given.clone() if given.is_inference() else given).to(vit.dtype)


def fused_type(vit: Anatomy, precision: Decided) -> torch.dtype | None:
    """The type in which attention stays fused though its rows are read; None where it is written out."""
    return HALF.get(precision) if vit.device.type == "cuda" and has_tiles() else None


def _runner_of(course: Course) -> type[Runner]:
    from patchlight.evidence.courses import LocalScores, OneHead

    return LocalScores if course.local is not None else OneHead if course.one_head else Runner


class Runner:
    """The state of one pass: evidence by layer, and the values of the class being explained."""

    def __init__(
        self, vit: Anatomy, runs: Anatomy, rule: Rule, jobs: Sequence[LayerJob], precision: Decided, course: Course
    ) -> None:
        self.vit, self.runs, self.rule, self.jobs, self.precision = vit, runs, rule, jobs, precision
        self.course = course
        self.backward = any(job.backward for job in jobs)
        self.fused = fused_type(vit, precision)
        self.scales = precision == "fp16" and self.backward
        places = [layer for job in jobs if job.backward for layer in job.layers]
        self.first = min(places, key=self._order, default=vit.depth)
        self.wants = {k: [j for j, job in enumerate(jobs) if k in job.layers] for k in range(FEATURES, vit.depth)}
        self.records: dict[int, Record] = {}
        self.values: list[dict[int, Any]] = [{} for _ in jobs]
        self.finished: set[int] = set()
        self.closing = False
        self.leaf = self.last = self.cut = self.scores = torch.empty(0)
        self.end = Record(vit.depth, torch.empty(0))
        self.projected: Tensor | None = None

    def release(self) -> None:
        """Let go of the graph: its hooks hold the runner."""
        self.last = self.cut = self.scores = torch.empty(0)

    def score(self, logits: Tensor, targets: Targets, score: Score) -> Tensor:
        """The explained scores [B,T] of the model's logits."""
        with torch.set_grad_enabled(self.backward):
            self.scores = self.scored(logits, targets, score)
        return self.scores

    def scored(self, logits: Tensor, targets: Targets, score: Score) -> Tensor:
        return score_of(logits, targets, score, self.vit.outputs)

    def forward(self, images: Tensor, tokens: Tensor | None) -> Tensor:
        vit = self.vit
        pixels = self.backward and self.first == PIXELS
        x = self.leaf = images.detach().requires_grad_(pixels)
        self.records[PIXELS] = Record(PIXELS, x.detach().movedim(1, -1))
        with self.running(pixels, self.records[PIXELS], frozenset(), in_block=False):
            x = self.embed(x).to(vit.dtype) if tokens is None else tokens
        for layer in range(vit.depth):
            watching().check()
            if layer == self._end_of_stage:
                x = self._feature_map(x)
            x = self._merge(layer, x)
            graph = self._graph(layer)
            if graph and layer == self.first:
                x = self.leaf = x.detach().requires_grad_()
            elif graph:
                x.register_hook(self._hook(layer))
            record = self.records[layer] = self.record(layer, x)
            with self.running(graph, record, self.needs(layer)):
                x = self.block(layer, x).to(vit.dtype)
            record.seen["y"] = x.detach()
            with torch.no_grad():
                for j in self.wants[layer]:
                    if not self.jobs[j].backward:
                        self.values[j][layer] = self.jobs[j].of(record)
            if not graph:
                del self.records[layer]
            elif record.fused is not None:
                record.shared.clear()  # a matrix that was written does not wait for the backward
        if vit.depth == self._end_of_stage:
            x = self._feature_map(x)
        needs = frozenset({"bias"} if any("bias" in job.needs for job in self.jobs) else ())
        needs |= {"A"} if vit.pooling == "map" else frozenset()
        self.end = Record(vit.depth, x.detach())
        if self.backward:
            x.register_hook(self._hook(vit.depth))
        if self.scales:
            self.last = x
            x = self.cut = x.detach().requires_grad_()
        with torch.set_grad_enabled(self.backward), self.tapped(self.backward, self.end, needs, in_block=False):
            return vit.readout(x)

    def needs(self, layer: int) -> frozenset[str]:
        """What is to be seen inside a block."""
        return TAPPED & frozenset[str]().union(*(self.jobs[j].needs for j in self.wants[layer]))

    def record(self, layer: int, x: Tensor) -> Record:
        record = Record(layer, x.detach(), self.vit.prefix, self.vit.depth, partial(self.vit.parts, layer))
        if self.projected is not None:
            record.seen["p"] = self.projected
        return record

    @contextlib.contextmanager
    def running(
        self,
        graph: bool,
        record: Record,
        needs: frozenset[str],
        in_block: bool = True,
        place: Merging | None = None,
    ) -> Iterator[None]:
        tapped = self.tapped(graph, record, needs, in_block, place)
        with torch.set_grad_enabled(graph), casting(self.vit, self.precision), tapped:
            yield

    def block(self, layer: int, x: Tensor) -> Tensor:
        """What a block makes of its input."""
        first = layer == self.vit.depth - 1 and self._first_row_is_enough()
        return self.runs.first_row(x) if first else self.runs.block(layer, x)

    def _first_row_is_enough(self) -> bool:
        """Whether the classifier reads the last block's first token alone, and nobody else reads anything of it."""
        read = self.wants[self.vit.depth - 1] or any("bias" in job.needs for job in self.jobs)
        return self.runs.reads_first and self.rule is PLAIN and not read

    @property
    def _end_of_stage(self) -> int | None:
        """How many blocks stand before the feature map, where one is there."""
        return min(self.vit.stage_end, self.vit.depth) if self.vit.hierarchical else None

    def _order(self, layer: int) -> float:
        """Where a layer stands: the feature map behind the blocks of its stage, and before what merges its tokens."""
        return layer if layer != FEATURES else (self._end_of_stage or 0) - 0.5

    def _graph(self, layer: int) -> bool:
        """Whether a layer is run with a graph."""
        return self.backward and self._order(layer) >= self._order(self.first)

    def _feature_map(self, x: Tensor) -> Tensor:
        """The tokens behind the stage that a hierarchical model is opened at, which stand for the input of a block."""
        if not self.wants[FEATURES]:
            return x
        if self.first == FEATURES:
            x = self.leaf = x.detach().requires_grad_()
        elif self._graph(FEATURES):
            x.register_hook(self._hook(FEATURES))
        record = self.records[FEATURES] = Record(FEATURES, x.detach(), self.vit.prefix)
        for j in self.wants[FEATURES]:
            if not self.jobs[j].backward:
                self.values[j][FEATURES] = self.jobs[j].of(record)
        return x

    def _merge(self, layer: int, x: Tensor) -> Tensor:
        """The tokens a block is given; the biases of what merges them are those of the block before."""
        merging = self.vit.merging(layer)
        if merging is None:
            return x
        graph = self._graph(layer) and layer != self.first
        before = self.records.get(layer - 1)
        if graph and before is not None:
            x.register_hook(self._hook_y(before))
        needs = self.needs(layer - 1) & {"bias"} if before is not None else frozenset[str]()
        record = before or Record(layer, x.detach())
        with self.running(graph, record, needs, in_block=False, place=merging):
            return self.runs.merge(layer, x).to(self.vit.dtype)

    @staticmethod
    def _hook_y(record: Record) -> Callable[[Tensor], None]:
        def arrived(gradient: Tensor) -> None:
            record.seen["gy"] = gradient

        return arrived

    def embed(self, images: Tensor) -> Tensor:
        if not any("p" in job.needs for job in self.jobs):
            return self.runs.embed(images)

        def keep(patches: Tensor) -> None:
            self.projected = patches.detach().to(self.vit.dtype).contiguous()

        with self.runs.projecting(keep):
            return self.runs.embed(images)

    def tapped(
        self,
        graph: bool,
        record: Record,
        needs: frozenset[str],
        in_block: bool = True,
        place: Merging | None = None,
    ) -> contextlib.AbstractContextManager[Any]:
        ruled = graph and self.rule.name != "plain"
        if not needs and not ruled:
            return contextlib.nullcontext()
        return Taps(self.rule, needs, record, in_block, self.fused, self.course.local is not None, place)

    def _hook(self, layer: int) -> Callable[[Tensor], None]:
        def arrived(gradient: Tensor) -> None:
            watching().check()
            self._gradient(layer, gradient)

        return arrived

    def _gradient(self, layer: int, gradient: Tensor) -> None:
        """The gradient of the tokens entering `layer`: the evidence of that layer is complete, so its jobs run."""
        if layer - 1 in self.records and self.vit.merging(layer) is None:
            self.records[layer - 1].seen["gy"] = gradient
        if layer not in self.records or layer in self.finished:
            return
        self.finished.add(layer)
        record = self.records[layer]
        record.seen["g"] = gradient
        record.complete()
        with torch.no_grad():
            for j in self.wants[layer]:
                if self.jobs[j].backward:
                    self.values[j][layer] = self.jobs[j].of(record)
        record.forget()
        if self.closing:
            self.records.pop(layer).clear()  # the graph holds on to the record until the backward is over

    def explain(self, target: int, last: bool) -> tuple[list[dict[int, Any]], End]:
        """The backward of one class: its values by job and layer, and the bias terms behind the last block."""
        if not self.backward:
            return self.values, self.end.end()
        scores = self.scores[:, target]
        if not scores.requires_grad:
            raise Unsupported(self.no_gradient())
        self.finished, self.closing = set(), last
        self.values = [{} if job.backward else self.values[j] for j, job in enumerate(self.jobs)]
        outputs, weights = scores.sum(), None
        if self.scales:
            weights, unscale = scaled(self.grad(outputs, self.cut, None, last))
            outputs = self.last
            for record in self.records.values():
                record.unscale = unscale
        gradient = self.grad(outputs, self.leaf, weights, last)
        if self.first == PIXELS:
            gradient = gradient.movedim(1, -1)
        for layer in sorted(self.records, key=self._order, reverse=True):
            if self._graph(layer) and layer not in self.finished and layer != self.first:
                self._gradient(layer, torch.zeros_like(self.records[layer].x))
        self._gradient(self.first, gradient)
        end = self.end.end()
        self.end.forget()
        return self.values, end

    def no_gradient(self) -> str:
        return (
            f"no gradient flows back through {self.vit.name}: a layer of it (quantised, or under no_grad) has none; "
            "methods that remove patches or mask pixels work"
        )

    def grad(self, outputs: Tensor, of: Tensor, weights: Tensor | None, last: bool) -> Tensor:
        try:
            (gradient,) = torch.autograd.grad(outputs, of, weights, retain_graph=not last, allow_unused=True)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise PatchlightError(
                f"the weights of {self.vit.name} were changed while it was explained; explain it between two steps of "
                "its training, or explain a copy"
            ) from error
        return torch.zeros_like(of) if gradient is None else gradient


def scaled(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of tokens where float16 is finest, each image times a power of two; and what undoes it [B].

    Backward each image is by itself and all is linear, so scaling changes nothing but what is lost.
    """
    largest = gradient.abs().flatten(1).amax(1)
    power = torch.floor(torch.log2(_MIDDLE / largest)).clamp(-100, 100)
    scale = torch.where(largest > 0, torch.exp2(power), 1.0)
    return gradient * scale.view(-1, *[1] * (gradient.ndim - 1)), 1 / scale


_MIDDLE = 64.0
"""Where the largest gradient is put: as many powers of two below float16's largest number as gradients may grow."""


@dataclass
class Trace:
    """The evidence itself: `tokens` x_0..x_L, `gradients` g_0..g_L-1, `attention` A_l and `attention_gradients` G_l.

    Attention is [B,H,N,N] (to, from); `target` [B,1] and `scores` [B,1] say what was explained. Of a hierarchical
    model each block has the tokens of its own stage, and x_l are those behind the merging.
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
    backward = RULES.find(rule)
    from patchlight.anatomy.load import wrap

    vit = wrap(vit)
    if vit.depth == 0:
        raise Unsupported(
            f"{vit.name} is opened as a feature map with no transformer blocks, so there is none to trace"
        )
    if vit.attention is not None:
        raise Unsupported(f"the attention of {vit.name} cannot be read: {vit.attention}")
    batch = vit.batch(images)
    targets = resolve_targets(target, len(batch), vit.outcomes, vit.labels)
    if targets is not None and targets.several:
        raise PatchlightError(f"a trace is of one class an image; {targets.count} were given for each")
    job = LayerJob(lambda e: (e.x, e.y, e.g, e.A, e.G), frozenset("xygAG"), tuple(range(vit.depth)))
    seen = run_pass(vit, batch, targets, score, backward, [job])
    layers = [seen.at(layer) for layer in range(vit.depth)]
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

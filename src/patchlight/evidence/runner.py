"""One pass: a tapped forward, block by block, and a backward during which the layer maps are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.outputs import weigh_states
from patchlight.anatomy.windows import Merging
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.progress import current_watcher
from patchlight.core.targets import Score, Targets, target_scores
from patchlight.evidence.precision import HALF, Decided, casting
from patchlight.evidence.record import BACKWARD, TAPPED, EndBias, Evidence, Record
from patchlight.evidence.rows import has_tiles
from patchlight.evidence.rules import PLAIN, Rule
from patchlight.evidence.taps import Taps

PIXELS = -1
"""The layer index of the image; its evidence has x = image and g = gradient, as [B,H,W,C]."""
FEATURES = -2
"""The layer index of a hierarchical model's feature map, after the stage it is opened at; it has only x and g."""


@dataclass(frozen=True)
class Course:
    """The score that a pass explains, if it is not the model's own score.

    Args:
        local: Every block has its own score, that of the readout of its output, and only the gradient of its own
            attention is recorded. The value is the input of the readout.
        pooler: The attention of the model's pooling is recorded instead of the block's.
        one_head: The last block attends with one head of full width.
        tokens: Tokens [B,N,D] that enter block 0 instead of the embedded images.
    """

    local: Literal["pooling", "cls", "patches", "tokens"] | None = None
    pooler: bool = False
    one_head: bool = False
    tokens: Tensor | None = field(default=None, compare=False)


WHOLE = Course()
"""The unchanged model, explained by its own score."""


@dataclass(frozen=True)
class LayerJob:
    """A function of the evidence of one block, and the blocks of which it is computed.

    Args:
        function: The function.
        needs: The parts of the evidence that it reads.
        layers: Blocks, PIXELS or FEATURES.
        name: The name of the function in errors.
    """

    function: Callable[[Evidence], Any]
    needs: frozenset[str]
    layers: tuple[int, ...]
    name: str = "this layer map"

    def of(self, record: Record) -> Any:
        """The result for one block."""
        return self.function(Evidence(record, self.needs, self.name))

    @property
    def backward(self) -> bool:
        """Whether the job needs a backward pass."""
        return bool(self.needs & BACKWARD)


def fused_type(vit: Anatomy, precision: Decided, rule: Rule, jobs: Sequence[LayerJob]) -> torch.dtype | None:
    """The type in which attention stays fused although its rows are read; None if it is written out.

    On a CPU, a rule leaves less of the backward than fused attention computes, and matrices that many jobs read are
    better written once.
    """
    if vit.device.type == "cuda":
        return HALF.get(precision) if has_tiles() else None
    few = sum(bool(job.needs & {"A", "G"}) for job in jobs) <= 2
    return vit.dtype if few and rule.attention == "plain" and precision == "full" else None


class Runner:
    """The state of one pass: the records by layer, and the values of the current class."""

    def __init__(
        self, vit: Anatomy, runs: Anatomy, rule: Rule, jobs: Sequence[LayerJob], precision: Decided, course: Course
    ) -> None:
        self.vit, self.runs, self.rule, self.jobs, self.precision = vit, runs, rule, jobs, precision
        self.course = course
        self.backward = any(job.backward for job in jobs)
        self.fused = fused_type(vit, precision, rule, jobs)
        self.scales = precision == "fp16" and self.backward
        places = [layer for job in jobs if job.backward for layer in job.layers]
        self.first = min(places, key=self._order, default=vit.depth)
        self.wants = {k: [j for j, job in enumerate(jobs) if k in job.layers] for k in range(FEATURES, vit.depth)}
        self.records: dict[int, Record] = {}
        self.values: list[dict[int, Any]] = [{} for _ in jobs]
        self.finished: set[int] = set()
        self.closing = False
        self.leaf = self.scores = torch.empty(0)
        self.reads = self.backward and vit.pooling == "gradient" and rule.name == "plain"
        self.last: list[Tensor] = []
        self.cut: list[Tensor] = []
        self.states: Mapping[int, Tensor] | None = None
        self.rows: list[dict[int, Tensor]] = []
        self.end = Record(vit.depth, torch.empty(0))
        self.projected: Tensor | None = None

    def release(self) -> None:
        """Release the graph, whose hooks refer to the runner."""
        self.last, self.cut, self.scores = [], [], torch.empty(0)

    def score(self, logits: Tensor, targets: Targets, score: Score) -> Tensor:
        """The explained scores [B,T] of the model's logits."""
        with torch.set_grad_enabled(self.backward):
            self.scores = self.scored(logits, targets, score)
        self.reads = self.reads and score == "logit" and targets.against is None
        return self.scores

    def scored(self, logits: Tensor, targets: Targets, score: Score) -> Tensor:
        """The explained scores [B,T]."""
        return target_scores(logits, targets, score, self.vit.outputs)

    def forward(self, images: Tensor, tokens: Tensor | None) -> Tensor:
        """Run the model and record what the jobs need."""
        vit = self.vit
        pixels = self.backward and self.first == PIXELS
        x = self.leaf = images.detach().requires_grad_(pixels)
        self.records[PIXELS] = Record(PIXELS, vit.channels_first(x.detach()).movedim(1, -1))
        with self.running(pixels, self.records[PIXELS], frozenset(), in_block=False):
            x = self.embed(x).to(vit.dtype) if tokens is None else tokens
        for layer in range(vit.depth):
            current_watcher().check()
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
                record.shared.clear()  # a written matrix need not wait for the backward
        if vit.depth == self._end_of_stage:
            x = self._feature_map(x)
        needs = frozenset({"bias"} if any("bias" in job.needs for job in self.jobs) else ())
        needs |= {"A"} if vit.pooling == "map" else frozenset()
        self.end = Record(vit.depth, x.detach())
        if self.backward:
            x.register_hook(self._hook(vit.depth))
        reads = self.vit.states(x) if vit.several_states else {vit.depth: x}
        if vit.several_states:
            self.states = {index: tokens.detach() for index, tokens in reads.items()}
        self.last = [tokens for tokens in reads.values() if tokens.requires_grad]
        self.reads = self.reads and len(self.last) == len(reads)
        if self.scales or self.reads:
            self.cut = [tokens.detach().requires_grad_() for tokens in self.last]
            flowing = [index for index, tokens in reads.items() if tokens.requires_grad]
            reads = {**reads, **dict(zip(flowing, self.cut, strict=True))}
        with torch.set_grad_enabled(self.backward), self.tapped(self.backward, self.end, needs, in_block=False):
            return vit.readout(reads if vit.several_states else reads[vit.depth])

    def needs(self, layer: int) -> frozenset[str]:
        """The parts to record inside a block."""
        return TAPPED & frozenset[str]().union(*(self.jobs[j].needs for j in self.wants[layer]))

    def record(self, layer: int, x: Tensor) -> Record:
        """A new record of one block."""
        record = Record(
            layer,
            x.detach(),
            self.vit.prefix,
            self.vit.depth,
            partial(self.vit.parts, layer),
            suffix=self.vit.suffix,
        )
        if self.projected is not None:
            record.seen["p"] = self.projected
        return record

    @contextlib.contextmanager
    def running(
        self, graph: bool, record: Record, needs: frozenset[str], in_block: bool = True, place: Merging | None = None
    ) -> Iterator[None]:
        """Context for a block, with gradients, precision and taps."""
        tapped = self.tapped(graph, record, needs, in_block, place)
        with torch.set_grad_enabled(graph), casting(self.vit, self.precision), tapped:
            yield

    def block(self, layer: int, x: Tensor) -> Tensor:
        """Run a block on its input."""
        first = layer == self.vit.depth - 1 and self._first_row_is_enough()
        return self.runs.first_row(x) if first else self.runs.block(layer, x)

    def _first_row_is_enough(self) -> bool:
        """Whether the classifier and all jobs read only the first token of the last block."""
        read = self.wants[self.vit.depth - 1] or any("bias" in job.needs for job in self.jobs)
        return self.runs.reads_first and self.rule is PLAIN and not read

    @property
    def _end_of_stage(self) -> int | None:
        """Number of blocks before the feature map, if there is one."""
        return min(self.vit.stage_end, self.vit.depth) if self.vit.hierarchical else None

    def _order(self, layer: int) -> float:
        """Position of a layer; the feature map comes after the blocks of its stage, before its tokens are merged."""
        return layer if layer != FEATURES else (self._end_of_stage or 0) - 0.5

    def _graph(self, layer: int) -> bool:
        """Whether a layer runs with a graph."""
        return self.backward and self._order(layer) >= self._order(self.first)

    def _feature_map(self, x: Tensor) -> Tensor:
        """Record the tokens after the stage that a hierarchical model is opened at, as the input of a block."""
        if not self.wants[FEATURES]:
            return x
        if self.first == FEATURES:
            x = self.leaf = x.detach().requires_grad_()
        elif self._graph(FEATURES):
            x.register_hook(self._hook(FEATURES))
        record = self.records[FEATURES] = Record(FEATURES, x.detach(), self.vit.prefix, suffix=self.vit.suffix)
        for j in self.wants[FEATURES]:
            if not self.jobs[j].backward:
                self.values[j][FEATURES] = self.jobs[j].of(record)
        return x

    def _merge(self, layer: int, x: Tensor) -> Tensor:
        """The input of a block after merging, whose biases are recorded in the previous block."""
        if not self.vit.changes(layer):
            return x
        graph = self._graph(layer) and layer != self.first
        before = self.records.get(layer - 1)
        if graph and before is not None:
            x.register_hook(self._hook_y(before))
        needs = self.needs(layer - 1) & {"bias"} if before is not None else frozenset[str]()
        record = before or Record(layer, x.detach())
        with self.running(graph, record, needs, in_block=False, place=self.vit.merging(layer)):
            return self.runs.merge(layer, x).to(self.vit.dtype)

    @staticmethod
    def _hook_y(record: Record) -> Callable[[Tensor], None]:
        def record_gradient(gradient: Tensor) -> None:
            record.seen["gy"] = gradient

        return record_gradient

    def embed(self, images: Tensor) -> Tensor:
        """Embed images, and record the patch projection if a job needs it."""
        if not any("p" in job.needs for job in self.jobs):
            return self.runs.embed(images)

        def keep(patches: Tensor) -> None:
            self.projected = patches.detach().to(self.vit.dtype).contiguous()

        with self.runs.projecting(keep):
            return self.runs.embed(images)

    def tapped(
        self, graph: bool, record: Record, needs: frozenset[str], in_block: bool = True, place: Merging | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context with taps, if anything is recorded or a rule applies."""
        ruled = graph and self.rule.name != "plain"
        if not needs and not ruled:
            return contextlib.nullcontext()
        return Taps(self.rule, needs, record, in_block, self.fused, self.course.local is not None, place)

    def _hook(self, layer: int) -> Callable[[Tensor], None]:
        def finish_layer(gradient: Tensor) -> None:
            current_watcher().check()
            self._gradient(layer, gradient)

        return finish_layer

    def _gradient(self, layer: int, gradient: Tensor) -> None:
        """Record the gradient of the tokens that enter `layer`, which completes its evidence, and run its jobs."""
        if layer - 1 in self.records and not self.vit.changes(layer):
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
            self.records.pop(layer).clear()  # the graph refers to the record until the backward is over

    def explain(self, target: int, last: bool) -> tuple[list[dict[int, Any]], EndBias]:
        """Run the backward of one class; returns its values by job and layer, and the bias terms after the blocks."""
        if not self.backward:
            return self.values, self.end.end()
        scores = self.scores[:, target]
        if not scores.requires_grad:
            raise Unsupported(self.no_gradient())
        self.finished, self.closing = set(), last
        self.values = [{} if job.backward else self.values[j] for j, job in enumerate(self.jobs)]
        outputs: Tensor | list[Tensor] = scores.sum()
        weights: list[Tensor] | None = None
        if self.cut:
            weights, outputs = self.grads(outputs, self.cut, None, last), self.last
            if self.reads:
                states = self.states or {self.vit.depth: self.end.x}
                self.rows.append(weigh_states(states, weights))
        if self.scales:
            weights, unscale = scaled(weights or [])
            for record in self.records.values():
                record.unscale = unscale
        gradient = self.grad(outputs, self.leaf, weights, last)
        if self.first == PIXELS:
            gradient = self.vit.channels_first(gradient).movedim(1, -1)
        for layer in sorted(self.records, key=self._order, reverse=True):
            if self._graph(layer) and layer not in self.finished and layer != self.first:
                self._gradient(layer, torch.zeros_like(self.records[layer].x))
        self._gradient(self.first, gradient)
        end = self.end.end()
        self.end.forget()
        return self.values, end

    def no_gradient(self) -> str:
        """The error message for a model without gradients."""
        return (
            f"no gradient flows back through {self.vit.name}: a layer (quantised, or under no_grad) blocks it; "
            "methods that remove patches or mask pixels work"
        )

    def grad(
        self, outputs: Tensor | Sequence[Tensor], inputs: Tensor, weights: Tensor | Sequence[Tensor] | None, last: bool
    ) -> Tensor:
        """The gradient of the outputs."""
        return self.grads(outputs, [inputs], weights, last)[0]

    def grads(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Tensor | Sequence[Tensor] | None,
        last: bool,
    ) -> list[Tensor]:
        """The gradients of the outputs with respect to several tensors."""
        try:
            gradients = torch.autograd.grad(outputs, inputs, weights, retain_graph=not last, allow_unused=True)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise PatchlightError(
                f"the weights of {self.vit.name} were changed while it was explained; explain it between two steps of "
                "its training, or explain a copy"
            ) from error
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]


def scaled(gradients: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Scale the gradients of each image by a power of two to fit float16; also returns the inverse factors [B].

    The backward is linear and images are independent, so only the rounding changes.
    """
    largest = torch.stack([gradient.abs().flatten(1).amax(1) for gradient in gradients]).amax(0)
    power = torch.floor(torch.log2(_MIDDLE / largest)).clamp(-100, 100)
    scale = torch.where(largest > 0, torch.exp2(power), 1.0)
    return [gradient * scale.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients], 1 / scale


_MIDDLE = 64.0
"""The largest scaled gradient, far below the maximum of float16, because gradients may grow."""

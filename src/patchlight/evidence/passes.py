"""Passes: one tapped forward, and one backward per explained class.

`run_pass` computes many layer maps in one pass, each as soon as its evidence is complete, so that only the maps remain
in memory. `trace` returns the raw evidence, for developing methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.progress import current_watcher
from patchlight.core.targets import Score, Target, Targets, resolve_targets, top_classes
from patchlight.evidence.courses import LocalScores, OneHead
from patchlight.evidence.precision import Decided, free_memory, lowered, rounding
from patchlight.evidence.record import EndBias
from patchlight.evidence.rules import PLAIN, RULES, Rule
from patchlight.evidence.runner import WHOLE, Course, LayerJob, Runner


def rows_at_once(vit: Anatomy) -> int:
    """Maximum number of image variants in one pass with a backward: 16, and on CUDA as many as fit in memory."""
    return fitting(vit) if vit.device.type == "cuda" and vit.depth else 16


def fitting(vit: Anatomy, half: bool = False, written: bool = False) -> int:
    """Maximum number of images in a pass with a backward on CUDA, 1 to 256: as many as fit in half of the free memory.

    The backward needs about 40 numbers per token, channel and block, of half the size in half precision, and if they
    are `written`, attention and its gradient.
    """
    depth, size = max(vit.depth, 1), vit.dtype.itemsize
    per_image = depth * vit.tokens * vit.width * 40 * size // (2 if half else 1)
    per_image += 2 * depth * vit.heads * vit.tokens**2 * size if written else 0
    return max(1, min(256, free_memory(vit.device) // 2 // per_image))


def in_memory(run: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """The result of `run` for independent rows [n,...], in two halves if memory runs out."""
    try:
        return run(rows)
    except (torch.OutOfMemoryError, MemoryError):
        if len(rows) == 1:
            raise
    return torch.cat([in_memory(run, half) for half in rows.chunk(2)])


@dataclass(frozen=True)
class Pass:
    """The result of a pass: logits [B,C], the explained scores [B,T], and the values of its jobs.

    `found` has, for each class and job, the values by layer, and `ends` the bias terms after the last block for each
    class; read them by `layers`, `at` and `end`. `pool` is the attention of an attention-pooling head.
    """

    logits: Tensor
    targets: Targets
    scores: Tensor
    found: Sequence[Sequence[Mapping[int, Any]]]
    ends: Sequence[EndBias] = (EndBias(),)
    pool: Tensor | None = None
    last: Tensor | None = None
    """The tokens [B,N,D] that the head reads, if it reads tokens."""
    states: Mapping[int, Tensor] | None = None
    """The states that the readout reads, by number, if these are several."""
    read: Sequence[Mapping[int, Tensor]] = ()
    """For each class, the weights with which it reads the tokens of each state, if the backward shows them."""
    _rows: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def layers(self, job: int = 0, target: int = 0) -> Mapping[int, Any]:
        """The values of a job for the explained class of that number, by layer."""
        return self.found[target][job]

    def at(self, layer: int, job: int = 0, target: int = 0) -> Any:
        """The value of a job at one layer."""
        return self.found[target][job][layer]

    def rows(self, vit: Anatomy, target: int = 0) -> dict[int, Tensor]:
        """The weights [B,N_i] with which the explained class of that number reads the tokens of each state, by state.

        They are 0 for an unread last state.

        Without `read` and `pool` they take a forward and backward of the readout, so they are computed when first read.
        """
        if target not in self._rows:
            self._rows[target] = self._find_rows(vit, target)
        return self._rows[target]

    def _find_rows(self, vit: Anatomy, target: int) -> dict[int, Tensor]:
        index = self.targets.index[:, target]
        unread = {} if self.last is None else {vit.depth: self.last.new_zeros(self.last.shape[:2])}
        if self.read:
            return unread | dict(self.read[target])
        if self.states is None:
            return {vit.depth: vit.pool_row(self.logits, self.pool, self.last, index)}
        return unread | vit.state_rows(self.states, index)

    def end(self, target: int = 0) -> EndBias:
        """The bias terms after the last block."""
        return self.ends[target]


def run_pass(
    vit: Anatomy,
    images: Tensor,
    targets: Targets | None = None,
    score: Score = "logit",
    rule: Rule = PLAIN,
    jobs: Sequence[LayerJob] = (),
    precision: Decided = "full",
    course: Course = WHOLE,
) -> Pass:
    """One forward over `images` and one backward per class, with all `jobs` run on the way.

    Blocks before the first layer that a backward job reads run without a graph; without backward jobs there is no
    backward. In bf16 and fp16 the products of the embedding and the blocks have that type; the tokens between them and
    the readout do not, and on CUDA attention stays fused.
    """
    current_watcher().check()
    vit = vit.wide()
    runs = lowered(vit, precision, products=True)
    with torch.inference_mode(False), vit.steady(), runs.steady():
        kind = LocalScores if course.local is not None else OneHead if course.one_head else Runner
        runner = kind(vit, runs, rule, jobs, precision, course)
        rounds: Decided = "tf32" if precision == "tf32" else "full"  # half precision is applied separately
        try:
            with rounding(vit, rounds):
                tokens = None if course.tokens is None else _usable(course.tokens, vit)
                logits = runner.forward(_usable(images, vit), tokens)
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
    last = runner.end.x if vit.rows_differ or (vit.head is not None and vit.head.block is not None) else None
    pool, rows = runner.end.seen.get("A"), runner.rows
    return Pass(logits.detach(), targets, scores.detach(), found, ends, pool, last, runner.states, rows)


def surely_predicted(vit: Anatomy, images: Tensor, logits: Tensor, precision: Decided) -> Targets:
    """The predicted classes; if rounding may have changed a prediction, it is repeated in full precision."""
    targets = top_classes(logits, vit.outputs)
    if precision == "full" or vit.outcomes == 1:
        return targets
    if logits.shape[1] == 1:  # label 1 against 0
        gap, limit = logits[:, 0].abs(), torch.tensor(0.25, device=logits.device)
    else:
        first, second = logits.topk(2, 1).values.unbind(1)
        gap, limit = first - second, _CLOSE * logits.abs().amax(1)
    close = (~(gap >= limit)).nonzero().flatten()  # or the logits overflowed
    if len(close):
        targets.index[close.to(targets.index.device)] = top_classes(vit.logits(images[close]), vit.outputs).index
    return targets


_CLOSE = 0.05
"""Two classes are close if their logits differ by less than this share of the largest; bf16 changes one by 0.01."""


def _usable(inputs: Tensor, vit: Anatomy) -> Tensor:
    """Convert a tensor to the type of the pass, and copy it if it is an inference tensor."""
    return (inputs.clone() if inputs.is_inference() else inputs).to(vit.dtype)


@dataclass
class Trace:
    """Raw evidence: `tokens` x_0..x_L, `gradients` g_0..g_L-1, `attention` A_l and `attention_gradients` G_l.

    Attention is [B,H,N,N] (to, from); `target` [B,1] are the explained classes, and `scores` [B,1] their scores. In a
    hierarchical model, each block has the tokens of its stage, after merging.
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
    vit: Anatomy | nn.Module, images: Any, target: Target = None, score: Score = "logit", rule: str = "plain"
) -> Iterator[Trace]:
    """Run one forward and one backward pass, and return the raw evidence, for developing methods.

    Args:
        vit: The model.
        images: The images, as in `explain`.
        target: The class, as in `explain`.
        score: What is explained, as in `explain`.
        rule: The name of the backward rule.

    Example:
        >>> with pl.trace(vit, images, target=281) as t:                                        # doctest: +SKIP
        ...     row = (t.attention[-1] * t.attention_gradients[-1]).relu().mean(1)[:, 0]
    """
    backward = RULES.find(rule)
    vit = wrap(vit)
    if vit.depth == 0:
        raise Unsupported(
            f"{vit.name} is opened as a feature map with no transformer blocks, so there are none to trace"
        )
    if vit.attention is not None:
        raise Unsupported(f"the attention of {vit.name} cannot be read: {vit.attention}")
    batch = vit.batch(images)
    targets = resolve_targets(target, len(batch), vit.outcomes, vit.labels)
    if targets is not None and targets.several:
        raise PatchlightError(f"a trace explains one class per image; {targets.count} were given")
    job = LayerJob(lambda e: (e.x, e.y, e.g, e.A, e.G), frozenset("xygAG"), tuple(range(vit.depth)))
    result = run_pass(vit, batch, targets, score, backward, [job])
    layers = [result.at(layer) for layer in range(vit.depth)]
    raw = Trace(vit, result.logits, result.targets.index, result.scores)
    raw.tokens = [x for x, *_ in layers] + [layers[-1][1]]
    raw.gradients = [g for _, _, g, _, _ in layers]
    raw.attention = [a for *_, a, _ in layers]
    raw.attention_gradients = [g for *_, g in layers]
    try:
        yield raw
    finally:
        for values in (raw.tokens, raw.gradients, raw.attention, raw.attention_gradients):
            values.clear()

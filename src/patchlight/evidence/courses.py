"""Passes that explain other scores than the model's: one score per block, or that of a rewritten last block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.core.errors import Unsupported
from patchlight.core.targets import Score, Targets
from patchlight.evidence.record import EndBias, Record
from patchlight.evidence.runner import PIXELS, Runner, scaled


class LocalScores(Runner):
    """A pass in which every block has its own score, with a graph that begins at the output of its attention.

    The inputs of blocks, queries, keys and the softmax are constant.
    """

    def forward(self, images: Tensor, tokens: Tensor | None) -> Tensor:
        vit = self.vit
        self.ways: dict[int, _Way] = {}
        record = Record(PIXELS, images)
        with self.running(False, record, frozenset(), in_block=False):
            x = self.embed(images).to(vit.dtype) if tokens is None else tokens
        for layer in range(vit.depth):
            record, is_read = self.record(layer, x), bool(self.wants[layer])
            inside = is_read and not self.course.pooler
            with self.running(inside, record, self.needs(layer) if inside else frozenset()):
                y = self.runs.block(layer, x).to(vit.dtype)
            x = record.seen["y"] = y.detach()
            if is_read:
                self.ways[layer] = self._way(record, y)
        self.end = Record(vit.depth, x)
        pool = frozenset({"A"} if vit.pooling == "map" else ())
        with torch.no_grad(), self.tapped(False, self.end, pool, in_block=False):
            return vit.readout(x)

    def _way(self, record: Record, y: Tensor) -> _Way:
        """The graph from the attention of a block, or of the pooling, to logits computed from the block's output."""
        top = y.detach() if self.course.pooler else y.detach().requires_grad_()
        needs = self.needs(record.index) if self.course.pooler else frozenset[str]()
        with torch.enable_grad(), self.tapped(True, record, needs, in_block=False):
            logits = self.vit.readout(self._reading(top))
        if self.course.pooler:
            self._keep_read(record)
        return _Way(record, y, top, logits)

    def _reading(self, y: Tensor) -> Tensor:
        """Tokens [B,N,D] from which every readout reads the value of this course."""
        if self.course.local == "pooling":
            return y
        read = {"cls": y[:, :1], "patches": self.vit.layout.of_cells(y), "tokens": y}[self.course.local or ""]
        return read.mean(1, keepdim=True).expand(-1, y.shape[1], -1)

    def _keep_read(self, record: Record) -> None:
        """Pad the keys and values of the pooling's attention with zeros to all tokens, and select its query."""
        record.only_read = True
        for name in ("k", "v"):
            if name in record.seen:
                value = record.seen[name]
                record.seen[name] = F.pad(value, (0, 0, self.vit.tokens - value.shape[2], 0))
        if "q" in record.seen and self.vit.pool_query == "cls":
            record.seen["q"] = record.seen["q"][:, :, :1]

    def score(self, logits: Tensor, targets: Targets, score: Score) -> Tensor:
        with torch.enable_grad():
            for way in self.ways.values():
                way.scores = self.scored(way.logits, targets, score)
        return self.scored(logits, targets, score)

    def explain(self, target: int, last: bool) -> tuple[list[dict[int, Any]], EndBias]:
        self.values = [{} for _ in self.jobs]
        for layer in sorted(self.ways, reverse=True):
            way = self.ways.pop(layer) if last else self.ways[layer]
            record = way.record
            record.see_dO(self._output_gradient(way, way.scores[:, target].sum(), last))
            with torch.no_grad():
                for j in self.wants[layer]:
                    self.values[j][layer] = self.jobs[j].of(record)
            record.forget()
        return self.values, EndBias()

    def _output_gradient(self, way: _Way, score: Tensor, last: bool) -> Tensor:
        leaf = way.record.leaf
        if leaf is None or not (way.y.requires_grad or self.course.pooler) or not score.requires_grad:
            raise Unsupported(self.no_gradient())
        if self.course.pooler:
            gradient = self.grad(score, leaf, None, last)
            return gradient[:, :, :1] if self.vit.pool_query == "cls" else gradient
        arriving = self.grad(score, way.top, None, last)
        if self.scales:
            (arriving,), way.record.unscale = scaled([arriving])
        return self.grad(way.y, leaf, arriving, last)

    def release(self) -> None:
        super().release()
        self.ways = {}


class OneHead(Runner):
    """A pass whose last block attends with one head of full width; the classes are predicted by the original model."""

    def forward(self, images: Tensor, tokens: Tensor | None) -> Tensor:
        self.rewritten = super().forward(images, tokens)
        last = self.records[self.vit.depth - 1]
        with self.running(False, last, frozenset()):
            row = self.runs.first_row(last.x).to(self.vit.dtype)
        with torch.no_grad():
            return self.vit.readout(row)

    def block(self, layer: int, x: Tensor) -> Tensor:
        if layer < self.vit.depth - 1:
            return self.runs.block(layer, x)
        self.records[layer].only_read = True
        return self.runs.first_row(x, heads=1)

    def score(self, logits: Tensor, targets: Targets, score: Score) -> Tensor:
        return super().score(self.rewritten, targets, score)

    def release(self) -> None:
        super().release()
        self.rewritten = torch.empty(0)


@dataclass
class _Way:
    """The graph of one block: its output y, `top` (y detached), and the logits and scores computed from it."""

    record: Record
    y: Tensor
    top: Tensor
    logits: Tensor
    scores: Tensor = field(default_factory=lambda: torch.empty(0))

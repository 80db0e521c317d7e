"""Maps, metrics and removals beside the same quantities taken from the plain model, with hooks and patched functions.

Nothing of the engine runs on the other side: attention is recorded where the libraries call their softmax, tokens where
they call their blocks, and painted images are run one by one. One model runs in the quick tests.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from tests import families, tiny_models
from tests.close import close
from tests.families import FAMILIES, RELATIVES, STAGED
from tests.literal.plain import maps
from tests.pairs import OWN, TEXTS, TRUNKS, shared_pair
from tests.tiny_models import MODELS

LIMIT = 1e-9
"""Of the largest value, in float64."""
TARGETS = [1, 2]
"""The class of each of the two images."""
OPEN_CLIP = tuple(f"open_clip-{kind}" for kind in (*OWN, *TRUNKS))
OF_TIMM = tuple(name for name in (*FAMILIES, *RELATIVES, *STAGED) if name != "vit-binary")
ALL = (*(name for name, row in MODELS.items() if not row.refused), *OF_TIMM, *OPEN_CLIP)
NOT_TILED = ("AST", "pit", "pit-distilled")
"""Their patches overlap, or do not end where the image does."""
OWN_TOKENS = ("V-JEPA2", "TimeSformer", "cait", "xcit", "convit")
"""Their blocks take the tokens in another order or number."""
OWN_ATTENTION = ("sam", "naflex-map", "siglip", "open_clip-siglip", "SigLIP", "hf-siglip", "hf-vit-eager")
"""Not one softmax in float64 for each block, or attention behind the blocks."""
TWO_READ = ("DINOv2", "DINOv2-registers", "hf-dinov2")
"""Their classifiers read CLS and patches."""
STAGES = ("staged", "map")
QUICK = "vit-wide"
PLAIN = tuple(
    name
    for name in ALL
    if (name not in MODELS or MODELS[name].structure not in STAGES)
    and name not in (*STAGED, *families.HIERARCHICAL, *OWN_TOKENS)
)
"""Models with one sequence of tokens."""


def each(names: tuple[str, ...], without: tuple[str, ...] = ()) -> Any:
    """Run a test on the models, most of them in the slow tests."""
    marks = {name: () if name == QUICK else pytest.mark.slow for name in names if name not in without}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@dataclass
class Case:
    """A model in float64: the user's, ours, and two inputs."""

    vit: Anatomy
    model: nn.Module
    batch: Tensor

    def logits(self, batch: Tensor) -> Tensor:
        """The user's model alone."""
        model: Any = self.model
        if self.vit.library == "open_clip":
            ids = self.vit.tokenizer(list(TEXTS), context_length=model.context_length)  # type: ignore[attr-defined]
            out = model.get_logits(batch, ids)[0]
        else:
            out = model(batch)
        out = getattr(out, "logits", out)
        return out if isinstance(out, Tensor) else out[0]

    def score(self, batch: Tensor) -> Tensor:
        """The logit of each image's class, added up."""
        return self.logits(batch)[range(len(batch)), TARGETS[: len(batch)]].sum()


class Packed(nn.Module):
    """A NaFlex model that takes images: it packs them as transformers' processor does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return tiny_models.packed(self.model, images)


@cache
def case(name: str) -> Case:
    if name in OPEN_CLIP:
        vit = shared_pair(name, torch.float64)
        return Case(vit, vit.model, families.images(vit, 2))
    if name in MODELS:
        model = copy.deepcopy(tiny_models.tiny(name)).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pl.AssumedPreprocess)
            shape = MODELS[name].shape if MODELS[name].structure == "volume" else None
            vit = pl.wrap(model, name=name, preprocess=tiny_models.preprocess(name), input_shape=shape)
        return Case(vit, Packed(model) if name == "SigLIP2" else model, tiny_models.inputs(name).double())
    vit = families.shared(name, torch.float64)
    return Case(vit, vit.model, families.images(vit, 2))


@dataclass
class Seen:
    """One forward and backward of the plain model: attention of the blocks [B,H,N,N], their inputs [B,N,D], gradients.

    `last` is the output of the last block.
    """

    attention: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    last: Tensor = field(default_factory=lambda: torch.empty(0))

    def rows(self) -> list[int]:
        """The tokens that the classifier reads: those with a gradient behind the last block."""
        assert self.last.grad is not None
        return (self.last.grad.abs().amax((0, 2)) > 0).nonzero().flatten().tolist()


def blocks_of(model: nn.Module, depth: int) -> list[nn.Module]:
    """The longest list of equal modules, of a vision tower where there is one."""
    lists = []
    for name, module in model.named_modules():
        children = list(module.children())
        alike = len({type(child) for child in children}) == 1
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len(children) == depth
            and alike
            and "text" not in name
        ):
            lists.append(("visual" in name or "vision" in name, children))
    return max(lists, key=lambda each: each[0])[1]


def seen(case: Case) -> Seen:
    """Run the user's model once, with hooks on its blocks and every softmax over [.., N, N] recorded."""
    found = Seen()
    blocks = blocks_of(case.model, case.vit.depth)
    inside = [False]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs["hidden_states"]
        tokens.retain_grad()
        found.inputs.append(tokens)
        inside[0] = True

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        inside[0] = False
        found.last = out if isinstance(out, Tensor) else out[0]
        found.last.retain_grad()

    softmax = torch.Tensor.softmax

    def keep(matrix: Tensor) -> Tensor:
        square = matrix.ndim >= 3 and matrix.shape[-1] == matrix.shape[-2]
        if inside[0] and square:
            matrix.retain_grad()
            found.attention.append(matrix)
        return matrix

    def plain_softmax(self: Tensor, *args: Any, **options: Any) -> Tensor:
        options.pop("_stacklevel", None)
        return keep(softmax(self, *args, **options))

    def written(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **options: Any) -> Tensor:
        scale = options.get("scale") or 1 / math.sqrt(q.shape[-1])
        scores = q @ k.mT * scale
        return keep(softmax(scores if attn_mask is None else scores + attn_mask, -1)) @ v

    handles = [b.register_forward_pre_hook(enter, with_kwargs=True) for b in blocks]
    handles += [b.register_forward_hook(leave) for b in blocks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", written)
        patch.setattr(F, "softmax", plain_softmax)
        patch.setattr(torch, "softmax", plain_softmax)
        patch.setattr(torch.Tensor, "softmax", plain_softmax)
        try:
            case.score(case.batch.clone().requires_grad_()).backward()
        finally:
            for handle in handles:
                handle.remove()
            case.model.zero_grad()
    assert len(found.inputs) == case.vit.depth
    return found


def channels(name: str) -> int | None:
    """The dimension of channels of a model's batches; None if there is none."""
    structure = MODELS[name].structure if name in MODELS else ""
    return {"video": 2, "sound": None}.get(structure, 1)


def along_axes(name: str, values: Tensor) -> Tensor:
    """Values of inputs without channels, with the axes of a map: frequency before time."""
    return values.mT if name == "AST" else values


@each(ALL)
def test_gradients_of_pixels(name: str) -> None:
    """grad, ixg and ig are sums over channels of what autograd alone gives."""
    this, axis = case(name), channels(name)

    def gradient(batch: Tensor) -> Tensor:
        leaf = batch.clone().requires_grad_()
        return torch.autograd.grad(this.score(leaf), leaf)[0]

    def summed(values: Tensor) -> Tensor:
        return along_axes(name, values if axis is None else values.sum(axis))

    slope = gradient(this.batch)
    path = torch.stack([gradient(this.batch * k / 3) for k in (1, 2, 3)]).mean(0) * this.batch
    shown = {"grad": summed(slope**2).sqrt(), "ixg": summed(slope * this.batch), "ig": summed(path)}
    settings: dict[str, dict[str, Any]] = {"ig": {"steps": 3, "quadrature": "right"}}
    for method, expected in shown.items():
        found = maps(this.vit, this.batch, method, TARGETS, level="pixel", **settings.get(method, {}))
        close(found, expected, LIMIT, method)


@each(ALL, NOT_TILED)
def test_occlusion_and_deletion(name: str) -> None:
    """Each patch painted in the images, one by one, and patches painted in an order."""
    this, axis = case(name), channels(name)
    grid = this.vit.grid
    steps = [extent // cells for extent, cells in zip(this.vit.extent, grid, strict=True)]

    def painted(batch: Tensor, cell: tuple[int, ...]) -> Tensor:
        """The images with zeros where a cell lies, which may reach over their border."""
        spans = [slice(i * step, (i + 1) * step) for i, step in zip(cell, steps, strict=True)]
        if axis is not None:
            spans.insert(axis - 1, slice(None))
        out = batch.clone()
        out[(slice(None), *spans)] = 0
        return out

    def scores(batch: Tensor) -> Tensor:
        with torch.no_grad():
            logits = this.logits(batch)
        return logits[range(len(batch)), TARGETS[: len(batch)]]

    cells = list(itertools.product(*map(range, grid)))
    base = scores(this.batch)
    drops = torch.stack([base - scores(painted(this.batch, cell)) for cell in cells], 1).view(2, *grid)
    found = maps(this.vit, this.batch, "occlusion", TARGETS, unit="patch", level="token", score="logit")
    close(found, drops, LIMIT, "occlusion")
    order = torch.stack([torch.randperm(len(cells), generator=torch.Generator().manual_seed(i)) for i in range(2)])
    ranking = torch.empty(2, len(cells), dtype=torch.float64)
    ranking.scatter_(1, order, -torch.arange(len(cells), dtype=torch.float64).expand(2, -1).contiguous())
    curve, batch = [base], this.batch
    for step in range(len(cells)):
        batch = torch.cat([painted(batch[i : i + 1], cells[int(order[i, step])]) for i in range(2)])
        curve.append(scores(batch))
    result = pl.evaluate(
        *(this.vit, this.batch, ranking.view(2, *grid), "deletion"),
        unit="patch",
        steps=None,
        score="logit",
        target=TARGETS,
    )
    assert result.curve is not None
    close(torch.as_tensor(result.curve), torch.stack(curve, 1), LIMIT, "deletion")


@each(PLAIN)
def test_tokens_of_blocks(name: str) -> None:
    """Methods that read the tokens at a block's input and their gradients."""
    this = case(name)
    run = seen(this)
    cells = slice(this.vit.prefix, this.vit.prefix + math.prod(this.vit.grid))
    for block in range(this.vit.depth):
        tokens, slope = run.inputs[block].detach(), run.inputs[block].grad
        assert slope is not None
        tokens, slope = (t.flatten(1, -2)[:, cells] for t in (tokens, slope))
        scale = float((tokens * slope).abs().sum(-1).max())
        shown = {
            **({"ixg": ((tokens * slope).sum(-1), {"start": block})} if block < this.vit.depth - 1 else {}),
            "grad": (slope.norm(dim=-1), {"start": block}),
            "gradcam": ((tokens * slope.mean(1, keepdim=True)).sum(-1), {"layer": block}),
            "layercam": ((tokens * slope.relu()).sum(-1), {"layer": block}),
        }
        for method, (expected, settings) in shown.items():
            found = maps(this.vit, this.batch, method, TARGETS, **settings).flatten(1)
            size = scale / float(expected.abs().max()) if method == "ixg" else 1
            close(found, expected, LIMIT * max(1.0, size), f"{method} at block {block}")


@each(PLAIN, (*OWN_ATTENTION, *TWO_READ))
def test_attention(name: str) -> None:
    """Attention methods, from the attention that the libraries' own softmax gave, with autograd's gradients."""
    this = case(name)
    run = seen(this)
    assert len(run.attention) == this.vit.depth
    cells = slice(this.vit.prefix, this.vit.prefix + math.prod(this.vit.grid))
    attention = [a.detach() for a in run.attention]
    products = [(a.detach() * a.grad).relu().mean(1) for a in run.attention if a.grad is not None]
    identity = torch.eye(attention[0].shape[-1], dtype=torch.float64)
    rollout = relevance = identity.expand(2, -1, -1)
    for a, e in zip(attention, products, strict=True):
        mean = a.mean(1) + identity
        rollout = mean / mean.sum(-1, keepdim=True) @ rollout
        relevance = relevance + e @ relevance
    rows = run.rows()
    prefix = [row for row in rows if row < this.vit.prefix]
    if len(rows) > len(prefix):
        rows = list(range(cells.start, cells.stop))
    shown = {"rawatt": attention[-1].mean(1), "rollout": rollout, "genatt": relevance, "gradsam": sum(products)}
    for method, matrix in shown.items():
        assert isinstance(matrix, Tensor)
        found = maps(this.vit, this.batch, method, TARGETS).flatten(1)
        close(found, matrix[:, rows].mean(1)[:, cells], LIMIT, method)

"""Grad-ECLIP: values weighted by the gradients of their channels and by the similarity of query and keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.contract import affine
from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import WHOLE, Course
from patchlight.methods.base import layer_map
from patchlight.methods.compositions import LAST
from patchlight.methods.legrad import Attended, no_pooler, reads_pooler

Cosine = Literal["raw", "projected", "none"]


def _is_last(settings: Settings, vit: Anatomy) -> bool:
    """Whether only the last block is read, without a composition."""
    return settings.get("layer") in (-1, vit.depth - 1)


def _course(settings: Settings, vit: Anatomy) -> Course:
    if settings["heads"] == "single":
        return Course(one_head=True)
    pooler = reads_pooler(settings, vit) and _is_last(settings, vit)
    return Course("pooling", pooler=True) if pooler else WHOLE


def _needs(settings: Settings) -> frozenset[str]:
    return frozenset({"v", "dO"} if settings["cosine"] == "none" else {"q", "k", "v", "dO"})


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    last, pooler = _is_last(settings, vit), _course(settings, vit).pooler
    if settings["heads"] == "single" and not last:
        return "heads='single' applies to the last block only; leave out layer and composition"
    if settings["heads"] == "single" and not vit.reads_first:
        return f"heads='single' needs a plain ViT with CLS pooling, which {vit.name} is not; heads='model' works"
    if settings["cosine"] == "projected" and (pooler or affine(vit.parts(vit.depth - 1).out) is None):
        return f"{vit.name} has no readable output projection of that attention; cosine='raw' works"
    if settings["attention"] == "pooler" and not last:
        return "the pooler follows the last block; leave out layer and composition"
    return no_pooler(settings, vit)


def _flat(heads: Tensor) -> Tensor:
    """[B,H,N,d] as [B,N,D]."""
    return heads.transpose(1, 2).flatten(2)


def spatial_weights(q: Tensor, k: Tensor, cells: slice) -> Tensor:
    """cos(q_i, k_j) over the full width [B,Q,N], min-max scaled over the patches j in `cells`; 0 where constant."""
    cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    low, high = cosine[..., cells].aminmax(dim=-1, keepdim=True)
    return torch.where(high > low, (cosine - low) / (high - low), 0)


@layer_map(
    "grad-eclip",
    paper="Zhao et al., ICML 2024",
    aliases=("gradeclip",),
    needs=_needs,
    combine=LAST,
    course=_course,
    refuses=_refuses,
    matrix=True,
    nonnegative=True,
    precision="full",
    presets={
        "code": {"heads": "single"},
        "evaluation": {"heads": "single", "cosine": "projected"},
        "wo-ksim": {"heads": "single", "cosine": "none"},
    },
    cost="1 forward + 1 backward through the last block",
    constant="no gradient is positive, or all keys are equally similar to the query; cosine='none' ignores the keys",
)
def grad_eclip(
    b: Evidence, cosine: Cosine = "raw", heads: Literal["model", "single"] = "model", attention: Attended = "auto"
) -> Tensor:
    """Values of the last block, weighted by their gradients and by the similarity of query and keys.

        R_j = lambda_j ReLU(sum_c w_c v_jc),   w = ds/do_CLS,   o = A v before the output projection

    lambda_j is the cosine of q_CLS and k_j over the full width, min-max scaled over the patches. Presets: `code` is the
    authors' notebook, `evaluation` their evaluation, `wo-ksim` their variant without lambda. Two extensions are ours:
    without CLS pooling, every row that the classifier reads has its own lambda, and the rows are averaged with the
    weights of `readout`; `layer` may be another block.

    Args:
        cosine: The cosine of queries and keys ("raw", the paper), of both after the output projection ("projected"), or
            lambda = 1 ("none").
        heads: "single" computes the last block, and so the score, with one head of the full width, as in the authors'
            code; this explains a different model.
    """
    weighted = (_flat(b.dO) @ _flat(b.v).mT).relu()
    if cosine != "none":
        project = affine(b.parts.out) if cosine == "projected" else None
        q, k = (_flat(t) if project is None else project.to(t)(_flat(t)) for t in (b.q, b.k))
        weighted = weighted * spatial_weights(q, k, b.cells)
    return weighted.mean(1) if b.only_read else weighted

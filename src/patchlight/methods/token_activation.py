"""Token activation: the logits of a word of an answer at the visual tokens of a language model."""

from __future__ import annotations

import torch
from torch import Tensor

from patchlight.anatomy.heads import Answer
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.vlm import AnswersAnatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Settings
from patchlight.methods.base import Ask, own_passes


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if not isinstance(vit, AnswersAnatomy):
        return f"it explains words of answers, and {vit.name} does not generate answers; use 'gradcam'"
    if getattr(vit.question, "against", None) not in (None, "prior"):
        return "it explains the words of one answer, not the difference between two; use 'ixg'"
    return None


@own_passes(
    "token-activation",
    paper="after Token Activation Map, Li et al., ICCV 2025",
    cost="1 forward",
    ruled=False,
    every_class=True,
    refuses=_refuses,
)
def token_activation(ask: Ask, earlier: bool = True) -> Tensor:
    """Logit lens of a word at the visual tokens, minus the part that is explained by the maps of earlier words.

        R = mean_{t in W} (a_t - beta_t m_t),   a_t[i] = logit of y_t at visual token i, minus its mean over i
        m_t = sum_{k before W} alpha_tk a_k,   beta_t = max(0, <a_t, m_t> / <m_t, m_t>)

    The logits are computed from the last hidden states of the language model. alpha_tk is the positive part of the
    logit of y_t at the position of the earlier word y_k of the answer, divided by the sum over k. This is our reading
    of Token Activation Map, without its rank-Gaussian filter: the map is signed, and words of the prompt are not
    subtracted. It is not `tam`, Transition Attention Maps. Patches that are merged into one visual token have the same
    value.

    Args:
        earlier: Whether the part that is explained by earlier words is subtracted.
    """
    vit, question = ask.vit, ask.vit.question
    if not isinstance(vit, AnswersAnatomy) or not isinstance(question, Answer):
        raise PatchlightError("token-activation explains words of answers; give head=pl.heads.Answer(…)")
    script, maps = vit.transcript, []
    for label in range(len(question.labels)):
        answer, tokens = (label, range(len(script.answers[label]))) if question.choices else (0, question.tokens[label])
        read, ids = script.read[answer], script.answers[answer]
        with torch.no_grad(), vit.steady():
            logits = vit.lens(ask.images, ids)
        cells = script.layout.of_cells(logits)
        cells = cells - cells.mean(1, keepdim=True)  # [B,n,T]
        before = min(tokens) if earlier else 0
        maps_of_tokens = []
        for t in tokens:
            alpha = logits[:, read[1 : before + 1], t].relu()  # a token is read at the position of its word
            alpha = alpha / alpha.sum(1, keepdim=True).clamp_min(torch.finfo(alpha.dtype).tiny)
            mixed = (cells[..., :before] * alpha[:, None]).sum(2)
            size = (mixed * mixed).sum(1, keepdim=True).clamp_min(torch.finfo(alpha.dtype).tiny)
            beta = ((cells[..., t] * mixed).sum(1, keepdim=True) / size).relu()
            maps_of_tokens.append(cells[..., t] - beta * mixed)
        maps.append(torch.stack(maps_of_tokens).mean(0))
    maps_of_labels = torch.stack(maps, 1)
    if vit.opened_at == "tower":
        maps_of_labels = maps_of_labels[..., vit.fine.sets("merge").to(maps_of_labels.device)]
    index = ask.targets.index.to(maps_of_labels.device)
    chosen = maps_of_labels.gather(1, index[..., None].expand(-1, -1, maps_of_labels.shape[2]))
    if ask.targets.against is not None:
        against = ask.targets.against.to(maps_of_labels.device)
        chosen = chosen - maps_of_labels.gather(1, against[..., None].expand_as(chosen))
    return chosen.unflatten(2, vit.grid)  # type: ignore[no-any-return]

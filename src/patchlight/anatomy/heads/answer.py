"""Answers of vision-language models: which part of the image made it say a word."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from textwrap import shorten
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from patchlight.anatomy.heads.question import Question
from patchlight.core.errors import DegenerateMap, PatchlightError, integer, warn
from patchlight.core.fingerprints import hash_images
from patchlight.core.registry import check_arguments
from patchlight.core.targets import Outputs

VISUAL = 0.5
"""Gain in nats from which a word counts as seen in the image."""
_ADDS = 0.1
"""Gain of an answer below which the image has almost no effect on it."""
_LONGEST = 64
"""Tokens of a generated answer."""


class Word(NamedTuple):
    """A word of an answer.

    `probability` is the geometric mean of its tokens', `gain` how much their log-probability falls without the image.
    """

    word: str
    probability: float
    gain: float
    tokens: tuple[int, ...]

    def __repr__(self) -> str:
        return f"{self.word} (probability {self.probability:.2g}, gain {self.gain:.2g})"

    @property
    def seen(self) -> bool:
        """Whether the gain is above 0.5 nats. A noun without a gain may be hallucinated."""
        return self.gain > VISUAL


class Answer(Question):
    """The answer of a vision-language model to a prompt, or words of it.

    .. math:: s = \\sum_{t \\in W} \\log p(y_t \\mid \\text{image}, \\text{prompt}, y_{<t})

    The answer is fixed while the image changes. The logit of a word is s over its tokens W, and its probability is the
    geometric mean exp(s / |W|). The gain of a word is s minus s without the image (the language prior).

    Args:
        prompt: The prompt, or its token ids with an image token.
        answer: The answer to explain, or its token ids. Default: the answer that the model generates (greedy).
        words: The words to explain. Default: each word with a gain above 0.5 nats. A list: each of these words.
            "visual": all words with a gain together. "all": the complete answer.
        against: Another answer, whose log-probability is subtracted. "prior": subtract the log-probability without the
            image, and scale the probability from 0 (without the image) to 1 (with it).
        choices: Answers to treat as classes, with a softmax over their log-probabilities.
        force: Whether to explain an answer that the model would not generate, or words without a gain.
        without: How the image is removed for the gain: "removed" removes the visual tokens from the language model,
            "blank" shows an image of the mean colour.
        others: Other images (or one) of a prompt with several; they stay as they are.
        position: The place of the explained image among them, from 0.

    Example:
        >>> answer = pl.heads.Answer("What is the dog holding?")                               # doctest: +SKIP
        >>> pl.explain(vit, "park.jpg", head=answer, target="frisbee").show()                   # doctest: +SKIP
    """

    tasks = ("answers",)
    normalised = False
    """Whether it is the question whose curves metrics follow, from the prior to the image."""
    text = ""
    """The answer of this image."""

    @check_arguments
    def __init__(
        self,
        prompt: str | Sequence[int],
        answer: str | Sequence[int] | None = None,
        words: Sequence[str] | str | None = None,
        against: str | Sequence[int] | None = None,
        choices: Sequence[str | Sequence[int]] | None = None,
        force: bool = False,
        without: Literal["removed", "blank"] = "removed",
        others: Any = None,
        position: int = 0,
    ) -> None:
        if isinstance(words, str) and words not in ("visual", "all"):
            words = [words]
        if words is not None and not words:
            raise PatchlightError("words is empty; give at least one word, or leave it out")
        if choices is not None:
            choices = [choices] if isinstance(choices, str) else choices
            if answer is not None or words is not None or against is not None:
                raise PatchlightError("choices are complete answers, so answer, words and against do not apply")
            if len({str(choice) for choice in choices}) < max(2, len(choices)):
                raise PatchlightError(f"choices has {len(choices)} answer(s); give at least two, each once")
            self.outputs = Outputs("softmax")
        self.prompt, self.answer, self.selection, self.against = prompt, answer, words, against
        self.choices, self.force, self.without = choices, force, without
        self.others, self.position = others, position
        self.labels: list[str] = []
        self.words: tuple[Word, ...] = ()

    def bound(self, vit: Any) -> Self:
        bound = super().bound(vit)
        if self.others is not None:
            bound = copy(bound)
            bound.pictures = vit.batch(self.others)
            integer("position", self.position, 0, len(bound.pictures))
        elif self.position:
            raise PatchlightError(f"position is {self.position}, but there is one image; give the others as others=")
        return bound

    pictures: Tensor | None = None
    """The other images [P-1,C,H,W] of the prompt, as the model takes them."""

    def beside(self, images: Tensor) -> Tensor:
        """Images [B,C,H,W] at their place among the other images of the prompt [B,P,C,H,W], if there are others."""
        if self.pictures is None:
            return images
        others = self.pictures.to(images).expand(len(images), *self.pictures.shape)
        return torch.cat([others[:, : self.position], images[:, None], others[:, self.position :]], 1)

    def about(self) -> dict[str, Any]:
        names: dict[str, Any] = {
            "prompt": self.prompt,
            "answer": self.answer,
            "words": self.selection,
            "against": None if self.normalised else self.against,
        }
        names |= {"choices": self.choices, "without": self.without if self.without != "removed" else None}
        if self.pictures is not None:
            names |= {"others": list(hash_images(self.pictures)), "position": self.position}
        return {"head": "Answer", **{key: value for key, value in names.items() if value is not None}}

    def measured(self) -> Answer:
        """The same words against the language prior: 0 without the image, 1 with it."""
        if self.choices is not None or self.against is not None:
            return self
        if self._measured is None:
            self._measured = copy(self)
            self._measured.against, self._measured.normalised = "prior", True
        return self._measured

    _measured: Answer | None = None

    def check_measured(self, labels: Sequence[int]) -> None:
        """Refuse words that are as probable without the image: nothing lies between the ends of their curve."""
        for label in labels if self.normalised else ():
            gain = float((self.full - self.prior)[self.tokens[label]].sum())
            if abs(gain) < _ADDS:
                raise PatchlightError(
                    f"the image has almost no effect on '{self.labels[label]}' ({gain:.2g} nats), so a curve from its "
                    "probability without the image to that with it says nothing; measure words with a gain"
                )

    def prepare(self, vit: Any, image: Tensor, size: tuple[int, int] | None) -> None:
        prompts = vit.prompts
        images = 1 if self.pictures is None else 1 + len(self.pictures)
        prompt = prompts.prompt(self.prompt, vit.image_tokens, vit.preprocess.size, images)
        if self.choices is not None:
            self.transcript = vit.transcribe(prompt, [prompts.answer(each) for each in self.choices], self)
            self.labels = [each if isinstance(each, str) else prompts.pieces(each)[0] for each in self.choices]
            return
        generated = self.answer is None
        ids = self._generate(vit, image, prompt) if self.answer is None else prompts.answer(self.answer)
        answers = [ids] if self.against in (None, "prior") else [ids, prompts.answer(self.against)]
        if answers[1:] == [ids]:
            raise PatchlightError("against is the explained answer itself; give another answer")
        self.transcript = vit.transcribe(prompt, answers, self)
        self.text = prompts.pieces(ids)[0].strip()
        with torch.no_grad():
            model = vit.ask(self, bind=False)
            visual = vit.visual_tokens(image)
            full = model.answer_logs(visual)[0][0]
            nothing = torch.zeros(1, 0, dtype=torch.long, device=image.device)
            mean = image.mean((2, 3), keepdim=True).expand_as(image)
            shown = (visual, nothing) if self.without == "removed" else (vit.visual_tokens(mean), None)
            prior = model.answer_logs(*shown)[0][0]
        self.full, self.prior = full, prior
        self.words = tuple(self._word(word, tokens) for word, tokens in prompts.words(ids))
        if not generated and not self.force:
            self._check_said(vit, image, prompt, ids)
        self._choose(len(ids))

    def _word(self, word: str, tokens: Sequence[int]) -> Word:
        at = list(tokens)
        gain = float((self.full[at] - self.prior[at]).sum())
        return Word(word, float(self.full[at].mean().exp()), gain, tuple(at))

    def _generate(self, vit: Any, image: Tensor, prompt: Sequence[int]) -> list[int]:
        """The most probable token again and again, until an end token."""
        ends, answer = vit.end_tokens(), list[int]()
        with torch.no_grad():
            while len(answer) < _LONGEST:
                ids = torch.tensor([*prompt, *answer], device=image.device)
                logits = vit.call(self.beside(image), ids, len(answer)).logits[0, -1]
                logits[vit.prompts.image_token] = -torch.inf  # it stands for pictures, not for words
                token = int(logits.argmax())
                if token in ends:
                    break
                answer.append(token)
        if not answer:
            raise PatchlightError(
                f"{vit.name} generates an empty answer for this image; give answer= to explain another one"
            )
        return answer

    def _check_said(self, vit: Any, image: Tensor, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """Warn of an answer that the model would not give."""
        with torch.no_grad():
            asked = torch.tensor([*prompt, *ids], device=image.device)
            logits = vit.call(self.beside(image), asked, len(ids)).logits[0]
        if logits[-len(ids) - 1 : -1].argmax(1).tolist() != list(ids):
            said = shorten(vit.prompts.pieces(self._generate(vit, image, prompt))[0], 60, placeholder="…")
            warn(
                f"the answer is not what {vit.name} says for this image (it says '{said}'); give force=True to explain "
                "it anyway, without this warning",
                DegenerateMap,
            )

    def _choose(self, count: int) -> None:
        """Find the tokens of each label, and refuse words without any, or without a gain."""
        gains = self.full - self.prior
        if self.selection == "all":
            self.labels, self.tokens = [self.text], [list(range(count))]
        elif self.selection is None or self.selection == "visual":
            seen = [word for word in self.words if word.seen or self.force]
            if not seen:
                most = max(self.words, key=lambda word: word.gain, default=None)
                best = f" (the largest gain is {most.gain:.2g} nats, of '{most.word}')" if most is not None else ""
                raise PatchlightError(
                    f"the image has almost no effect on any word of the answer '{self.text}'{best}; set words=[…] and "
                    "force=True to explain some anyway"
                )
            if self.selection is None:
                self.labels, self.tokens = _numbered([word.word for word in seen]), [list(w.tokens) for w in seen]
            else:
                self.labels = [" ".join(word.word for word in seen)]
                self.tokens = [sorted({t for word in seen for t in word.tokens})]
        else:
            chosen = [self._find(word) for word in self.selection]
            self.labels, self.tokens = [label for label, _ in chosen], [tokens for _, tokens in chosen]
        weak = [
            label for label, at in zip(self.labels, self.tokens, strict=True) if abs(float(gains[at].sum())) < _ADDS
        ]
        if weak and not self.force:
            raise PatchlightError(
                f"the image has almost no effect on '{weak[0]}' (its log-probability without the image is within "
                f"{_ADDS} nats), so a map would not explain it; set force=True to compute it anyway"
            )

    def _find(self, word: str) -> tuple[str, list[int]]:
        """The tokens of a word or of several words in a row."""
        spoken = [word.word.casefold() for word in self.words]
        parts = word.casefold().split()
        for i in range(len(spoken) - len(parts) + 1):
            if parts and spoken[i : i + len(parts)] == parts:
                return word, sorted({t for word in self.words[i : i + len(parts)] for t in word.tokens})
        raise PatchlightError(
            f"the answer '{self.text}' is {len(self.full)} tokens and none of them lies in words={[word]}; its words "
            "are " + (", ".join(each.word for each in self.words) or "none")
        )

    def read(self, output: Any, rows: int) -> tuple[Tensor, Tensor]:
        logs = output[0]
        sums = torch.stack([logs[:, at].sum(1) for at in self.tokens], 1)
        means = torch.stack([logs[:, at].mean(1) for at in self.tokens], 1)
        if self.against is None:
            return sums, means.exp()
        if self.against != "prior":
            difference = sums - output[1].sum(1, keepdim=True)
            return difference, difference.sigmoid()
        low, high = (
            torch.stack([each[at].mean() for at in self.tokens]).exp().to(sums) for each in (self.prior, self.full)
        )
        base = torch.stack([self.prior[at].sum() for at in self.tokens]).to(sums)
        return sums - base, (means.exp() - low) / (high - low)

    def logits(self, output: Any, rows: int) -> Tensor:
        if self.choices is None:
            return super().logits(output, rows)
        return torch.stack([logs.sum(1) for logs in output], 1)

    def default_target(self) -> Any:
        return None if self.choices is not None else super().default_target()


def _numbered(words: Sequence[str]) -> list[str]:
    """Words, of which repeated ones are numbered."""
    return [word if words.count(word) == 1 else f"{word} {words[: i + 1].count(word)}" for i, word in enumerate(words)]

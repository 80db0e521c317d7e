"""Prompts and answers as the ids of a vision-language model's tokenizer, and the words that tokens belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from PIL import Image

from patchlight.anatomy.texts import NoTokenizer
from patchlight.core.errors import PatchlightError, escape_surrogates, first_line

ANSWERING = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""The classes of transformers that answer in words and can be opened."""
_TILES = ("do_image_splitting", "crop_to_patches", "do_pan_and_scan")
"""Settings of processors that cut a picture into tiles."""
_REPEATING = ("Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Processors that only repeat the image token of a prompt, as often as their own size of the picture needs."""
_WORD = re.compile(r"\w+(?:['’\-]\w+)*")


@dataclass(frozen=True)
class Prompts:
    """The text side of a model.

    Args:
        tokenizer: Its tokenizer; None if there is none.
        processor: Its processor, which puts the image into the prompt; None if there is none.
        image_token: The id of an image token.
        name: The name of the model in errors.
        tiled: Whether the model sees an image in tiles.
    """

    tokenizer: Any
    processor: Any
    image_token: int
    name: str
    tiled: bool = False

    @staticmethod
    def of(processor: Any, tokenizer: Any, image_token: int, name: str) -> Prompts:
        """The text side of a processor, or of a tokenizer alone."""
        own = getattr(processor, "tokenizer", None)
        if own is not None and getattr(processor, "patch_size", 1) is None:  # put together from its parts
            processor, tokenizer, own = None, own if tokenizer is None else tokenizer, None
        return Prompts(own if tokenizer is None else tokenizer, None if own is None else processor, image_token, name)

    def _check(self) -> None:
        if self.tokenizer is None or isinstance(self.tokenizer, NoTokenizer):
            why = f" ({self.tokenizer.reason})" if isinstance(self.tokenizer, NoTokenizer) else ""
            raise PatchlightError(
                f"{self.name} has no processor or tokenizer{why}, so it cannot read a prompt; give processor= or "
                "tokenizer= of transformers, or the prompt and the answer as lists of ids"
            )

    def prompt(self, prompt: str | Sequence[int], each: int, size: tuple[int, ...], images: int = 1) -> list[int]:
        """The ids of a prompt, with `each` image tokens in the place of each of its images.

        Args:
            prompt: A sentence, or ids with one image token of each image or all of them.
            each: The number of image tokens of an image.
            size: Height and width of an image.
            images: The number of images.
        """
        ids = self._ids(prompt, size, images) if isinstance(prompt, str) else [int(i) for i in prompt]
        count = ids.count(self.image_token)
        if count == 0:
            raise PatchlightError(
                f"the prompt {prompt!r} of {self.name} has no image token; add the image token (id "
                f"{self.image_token}) to it, or give a tokenizer that has one"
            )
        if count == images:
            return [i for id in ids for i in [id] * (each if id == self.image_token else 1)]
        if count != each * images:
            raise PatchlightError(
                f"the prompt of {self.name} has {count} image token{'s' * (count > 1)}, but the number of images is "
                f"{images} ({size[0]} x {size[1]} pixels, {each} tokens each); give other images as others=, and with "
                "preprocess= a size that the processor cuts into the same tiles"
            )
        return ids

    def _ids(self, prompt: str, size: tuple[int, ...], images: int) -> list[int]:
        self._check()
        token = str(self.tokenizer.convert_ids_to_tokens(self.image_token) or "")
        writer = self.tokenizer if self.processor is None else self.processor
        try:
            if getattr(writer, "chat_template", None):
                content: Any = f"{token * images}\n{prompt}"
                if self.processor is not None:
                    content = [*[{"type": "image"}] * images, {"type": "text", "text": prompt}]
                said = [{"role": "user", "content": content}]
                text = writer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            else:
                text = prompt if token in prompt else f"{token * images}{prompt}"
            if type(writer).__name__ in _REPEATING or self.processor is None:
                return [int(i) for i in self.tokenizer(text)["input_ids"]]
            blank = Image.new("RGB", (size[1], size[0]), (128, 128, 128))
            settings = getattr(self.processor, "image_processor", None)
            complete = {} if self.tiled else {key: False for key in _TILES if getattr(settings, key, False)}
            pictures = blank if images == 1 else [blank] * images
            return [int(i) for i in self.processor(text=text, images=pictures, **complete)["input_ids"][0]]
        except Exception as error:
            raise PatchlightError(
                f"the {type(writer).__name__} of {self.name} cannot read the prompt {prompt!r}: {first_line(error)}"
            ) from error

    def answer(self, answer: str | Sequence[int]) -> list[int]:
        """The ids of an answer."""
        if isinstance(answer, str):
            self._check()
            ids = self.tokenizer(escape_surrogates(answer), add_special_tokens=False)["input_ids"]
        else:
            ids = answer
        if len(ids) == 0:
            raise PatchlightError(f"the answer {answer!r} has no tokens; give at least one word")
        if self.image_token in ids:
            raise PatchlightError(f"the answer {answer!r} contains an image token; give an answer of words only")
        return [int(i) for i in ids]

    def pieces(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of an answer, and where in it each token is."""
        if self.tokenizer is None or isinstance(self.tokenizer, NoTokenizer):
            texts = ["".join(f"token{i} " for i in ids[:count]) for count in range(len(ids) + 1)]
        else:
            texts = [self.tokenizer.decode(list(ids[:count])) for count in range(len(ids) + 1)]
        spans = [(min(len(a), len(b)), len(b)) for a, b in pairwise(texts)]
        return texts[-1], spans

    def words(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """The words of an answer, and which of its tokens overlap each."""
        text, spans = self.pieces(ids)
        found = []
        for match in _WORD.finditer(text):
            tokens = [i for i, (begin, end) in enumerate(spans) if begin < match.end() and end > match.start()]
            found.append((match.group(), tokens))
        return found

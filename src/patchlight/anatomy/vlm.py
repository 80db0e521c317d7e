"""Vision-language models: a vision tower, whose patches become visual tokens among the text tokens of a language model.

A model is opened at its tower, or (`place="language"`) at the visual tokens in its language model. Its own forward is
crossed at the blocks of both; the language model runs short sequences with the arguments that it was recorded with.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Parts, States
from patchlight.anatomy.discovery import map_tensors, tensors_in
from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.hf import CLIP, SIGLIP, HuggingFaceAnatomy, as_processed
from patchlight.anatomy.intercepting import Entered, Site, crossing
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.preprocessing import applied
from patchlight.anatomy.probe import alike, random_image
from patchlight.anatomy.prompts import ANSWERING, Prompts
from patchlight.anatomy.tasks import TaskAnatomy
from patchlight.anatomy.twin import Twin
from patchlight.core.errors import AssumedPreprocess, PatchlightError, Unsupported, first_line, warn
from patchlight.core.images import Preprocess
from patchlight.core.layout import Layout
from patchlight.core.resize import to_pixels
from patchlight.core.targets import Outputs, log_probabilities
from patchlight.zoo import pocket

Place = Literal["tower", "language"]
KNOWN: Mapping[str, Preprocess] = {
    kind: CLIP if kind.startswith(("Llava", "InternVL", "Qwen2")) else SIGLIP for kind in ANSWERING
}
"""The preprocessing of the tower that each model was published with."""
BUNDLED = Path(pocket.__file__).parent / "pocket-vlm"
"""The folder of the bundled model that answers questions about composed scenes."""
_TOWERS = ("model.vision_tower", "model.vision_model", "model.visual")
_LANGUAGES = ("model.language_model", "model.text_model")
_TILED = ("LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration")
_NO_RULE = "norms and gated MLPs of its language model have no rule yet"
_UNSIZED = (448, 448)
"""The size of images for models that take any, if no other is given."""


@dataclass(frozen=True)
class Transcript:
    """A prompt with its image, and answers to it, as one sequence: prompt, answers, visual tokens.

    Each answer follows the prompt and does not attend to the other answers; positions are those of the plain model.

    Args:
        layout: The layout of the sequence: its text is the prefix, visual tokens are the cells.
        prompt: The ids [P] of the prompt, with one image token for each visual token.
        answers: The ids [T] of each answer.
        text: What enters the language model for each token of the text [S,D].
        calls: The other arguments of each block of the language model.
        read: For each answer, the places in the text whose outputs predict its tokens [T].
    """

    layout: Layout
    prompt: Tensor
    answers: Sequence[Tensor]
    text: Tensor
    calls: Sequence[Mapping[str, Any]]
    read: Sequence[Tensor]
    recent: list[Any] = field(default_factory=list, compare=False, repr=False)
    """The masks of the last sequence that was run."""
    before: int = 0
    """How many tokens of the text stand before the image and attend to nothing behind them."""
    keys: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """By type: the net they were computed with, and keys and values of these tokens, the same for every image."""


class Keys:
    """Keys and values of the first `count` tokens, in the place of a cache: recorded once, then put before others."""

    count = 0

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if not self.count:
            self.layers[layer] = key, value
            return key, value
        first = (each[:, :, : self.count].expand(len(key), -1, -1, -1) for each in self.layers[layer])
        return torch.cat([next(first), key], 2), torch.cat([next(first), value], 2)


class AnswersAnatomy(TaskAnatomy):
    """A model of transformers that answers in words.

    Args:
        model: The model.
        place: Which tokens are the patches: those of the "tower", or the visual tokens in the "language" model.
        processor: The model's processor, with its tokenizer and chat template.
        tokenizer: A tokenizer, if there is no processor.
        name: The name of the model.
        about: Other keywords of `wrap`, such as `preprocess`.
    """

    library = "transformers"
    task = "answers"
    reads_positions = True
    prefers = ("genatt", "grad")  # see docs/results/answers.md

    def __init__(
        self,
        model: Any,
        *,
        place: Place = "tower",
        processor: Any = None,
        tokenizer: Any = None,
        name: str | None = None,
        **about: Any,
    ) -> None:
        name = name or getattr(model, "name_or_path", "") or type(model).__name__
        if place not in ("tower", "language"):
            raise PatchlightError(f"place is {place!r}; give 'tower' or 'language'")
        for key in ("labels", "sigmoid", "regression"):
            if about.pop(key, None):
                raise PatchlightError(f"{name} answers in words, so {key} does not apply; give head=pl.heads.Answer(…)")
        self.at, self.config = place, model.config
        self.prompts = Prompts.of(processor, tokenizer, _image_token(model.config), name)
        about.setdefault("preprocess", None)
        preprocess = about.pop("preprocess") or _preprocess(model, processor, name)
        tower, language = (_first(model, paths, name) for paths in (_TOWERS, _LANGUAGES))
        self.language_path = language
        layers = f"{language}.layers"
        self.tower_paths = [f"{tower}.{path}" for path in _blocks(model.get_submodule(tower))]
        self.language_paths = [f"{layers}.{i}" for i in range(len(model.get_submodule(layers)))]
        seen = _see(self, model, preprocess, name)
        self.tower_paths, self.visual, self._packed = self.tower_paths[: seen.read], seen.visual, seen.packed
        self.dead = seen.dead
        grid = seen.grid
        merge = round(math.sqrt(math.prod(grid) / self.visual))
        if merge**2 * self.visual != math.prod(grid):
            raise Unsupported(
                f"{name} makes {self.visual} visual tokens of {grid[0]} x {grid[1]} patches, which is not "
                "one of each square of patches"
            )
        self.merge_size = merge
        self.fine = Layout(grid, seen.tokens - math.prod(grid), merge=merge)
        self.coarse = (grid[0] // merge, grid[1] // merge)
        own = {"grid": grid, "prefix": self.fine.prefix} if place == "tower" else {"grid": self.coarse, "prefix": 0}
        self._blank_ids = torch.tensor([*[_image_token(model.config)] * self.visual, *seen.trial])
        self.head_paths = self.language_paths
        self.spared = (language, "lm_head")
        super().__init__(
            model,
            paths=self.tower_paths,
            name=name,
            preprocess=preprocess,
            heads=seen.heads,
            **own,
            **about,
        )
        self.can_decompose = _NO_RULE
        self._one_blank = False
        if place == "language":
            self.sinks = (
                "attention of a language model often falls on its first tokens (sinks), whatever the image shows; "
                "'genatt', which weighs it by its gradient, and 'ixg' work better"
            )
        if place == "language" or not _plain(model.get_submodule(self.tower_paths[0])):
            self.can_rule = _NO_RULE if place == "language" else "norms and gated MLPs of its tower have no rule yet"
        elif self.dead:
            self.note = f"the vision tower of {name} reads block {seen.read - 1} last: blocks behind it do nothing"

    note = ""
    """What a user should know about how it was opened."""

    def wide(self) -> Self:
        """With a tower in float32; in its language model nothing needs more than the model's own type."""
        return self if self.at == "language" else super().wide()

    def default_question(self) -> Any:
        raise PatchlightError(
            f"{self.name} answers in words, so it needs a question: head=pl.heads.Answer('what is …'), or --prompt of "
            "the command line"
        )

    # the image

    def pixels(self, images: Tensor) -> dict[str, Any]:
        """Images [B,C,H,W] as the model takes them."""
        return _pixels(self.config, images)

    def blank(self, count: int) -> Tensor:
        return torch.ones(count, *self.input_shape, device=self.device, dtype=self.dtype)

    def call(self, images: Tensor, ids: Tensor | None = None, suffix: int = 0) -> Any:
        """Run the twin on images and the ids [S] of a prompt, the last `suffix` of which are an answer."""
        ids = self._blank_ids if ids is None else ids
        return _run(self.net, images, ids, suffix)

    # the sequence of the language model

    @property
    def transcript(self) -> Transcript:
        """The sequence that the language model reads: that of the question, or a trial."""
        asked = getattr(self.question, "transcript", None)
        if asked is not None:
            return cast(Transcript, asked)
        cache, key = self.running.prepared, ("trial", self.at)
        if key not in cache:
            ids = self._blank_ids.tolist()
            cache[key] = self.transcribe(ids[:-2], [ids[-2:]])
        return cast(Transcript, cache[key])

    @torch.no_grad()
    def transcribe(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> Transcript:
        """Run the model on a prompt with each answer, and record what enters the blocks of its language model."""
        device, token = self.device, _image_token(self.config)
        ids = [torch.tensor([*prompt, *answer], device=device) for answer in answers]
        runs = [self._record_language(each, len(answer)) for each, answer in zip(ids, answers, strict=True)]
        size, image = len(prompt), ids[0][: len(prompt)] == token
        text = (~image).nonzero()[:, 0]
        lengths = [len(answer) for answer in answers]
        joined = [torch.cat([text, torch.arange(size, size + lengths[0], device=device)])]
        joined += [torch.arange(size, size + length, device=device) for length in lengths[1:]]
        joined.append(image.nonzero()[:, 0])  # visual tokens are those of the first run
        owner = [0, *range(1, len(answers)), 0]
        embedded = torch.cat([runs[run][0][0, at] for run, at in zip(owner, joined, strict=True)][:-1])
        calls = [
            _join([run[1][index] for run in runs], [len(each) for each in ids], owner, joined, size)
            for index in range(len(self.language_paths))
        ]
        for call in calls:  # blocks of one kind share their mask
            same = (other["attention_mask"] for other in calls)
            call["attention_mask"] = next(mask for mask in same if torch.equal(mask, call["attention_mask"]))
        read, begin, last = [], len(text), len(text) - 1
        if not bool((text == size - 1).any()):
            raise PatchlightError("the prompt ends with the image; put text behind it")
        for length in lengths:
            places = torch.arange(begin - 1, begin - 1 + length, device=device)
            places[:1] = last
            read.append(places)
            begin += length
        layout, before = Layout(self.coarse, prefix=len(embedded)), int(image.nonzero()[0, 0])
        if any(bool(call["attention_mask"][:before, before:].any()) for call in calls):
            before = 0
        answered = [each[size:] for each in ids]
        return Transcript(layout, ids[0][:size], answered, embedded, calls, read, before=before)

    def _record_language(self, ids: Tensor, suffix: int) -> tuple[Tensor, list[dict[str, Any]]]:
        """What enters the first block of the language model, and the arguments of each, for a blank image."""
        sites, entered, calls = self.sites, list[Tensor](), list[dict[str, Any]]()

        def at(site: Site) -> Any:
            if any(site.module is layer for layer in sites.heads):
                entered.append(site.tokens)
                calls.append({key: value for key, value in site.kwargs.items() if key != site.keyword})
                if len(site.args) > 1 or "attention_mask" not in site.kwargs:
                    raise Unsupported(f"the language model of {self.name} is called in a way that is not supported")
                return site.tokens
            return site.run()

        with crossing(at):
            self.call(self.blank(1), ids, suffix)
        return entered[0], calls

    def see_visual(self, images: Tensor | None = None, tokens: States | None = None) -> Tensor:
        """The visual tokens [B,n,D] that enter the language model, of images or of the states of the tower.

        What its forward adds to them behind its first blocks stands in further channels [B,n,(1+added)D].
        """
        sites, entered = self.sites, list[Tensor]()

        def stop(number: int | None, site: Site) -> Any:
            if not any(site.module is layer for layer in sites.heads):
                return site.run()
            entered.append(site.tokens[:, : self.visual])
            if len(entered) > (len(sites.heads) - 1 if self.added is None else self.added):
                raise Entered(torch.cat(entered, 2))
            return torch.zeros_like(site.tokens)  # so that what enters the next block is what is added

        count, states = len(self.tower_paths), {} if tokens is None else self._states(tokens)
        at = self.replay(states, count - 1, stop) if states else partial(stop, None)
        try:
            with self.intercepted(at, bool(states)):
                self.call(self.blank(len(states[count])) if states else cast(Tensor, images))
        except Entered as last:
            return last.tokens
        raise PatchlightError(f"the forward of {self.name} does not call its language model")

    added: int | None = None
    """Behind how many blocks of the language model the forward adds to the visual tokens; None: not seen yet."""

    def _states(self, tokens: States) -> dict[int, Tensor]:
        return self.states(tokens) if isinstance(tokens, Tensor) else dict(tokens)

    def _sequence(self, visual: Tensor) -> Tensor:
        """Text and visual tokens [B,S+n,D]; nothing is added to text."""
        text = self.transcript.text.to(visual)
        text = nn.functional.pad(text, (0, visual.shape[2] - text.shape[1]))
        return torch.cat([text.expand(len(visual), -1, -1), visual], 1)

    def _layer(self, index: int, tokens: Tensor, keep: Tensor | None, keys: Keys | None = None) -> Tensor:
        """A block of the language model, on the text and the visual tokens at `keep` [B,k], and what is added to it.

        Tokens whose `keys` are known are not among these.
        """
        script, layer, added = self.transcript, self.sites.heads[index], self.added or 0
        tokens, *more = tokens.chunk(1 + added, 2)
        named = script.calls[index]
        places = None if keep is None else script.layout.places(keep)
        mask = _mask(script, named["attention_mask"], keep, places, tokens.dtype)
        others = {key: value for key, value in named.items() if key != "attention_mask"}
        if keys is not None:
            others["past_key_values"], mask = keys, mask[:, :, keys.count :]
            places = None if places is None else places[:, keys.count :]

        def suited(value: Tensor) -> Tensor:
            axis = _axis(value, script.layout.count)
            if places is not None and axis is not None:
                value = value.movedim(axis, 0)[places]  # [B,k,...]
                value = value.squeeze(2) if axis == 1 else value.movedim(0, axis)
            return value.to(tokens.dtype) if value.is_floating_point() else value

        out = tensors_in(layer(tokens, attention_mask=mask, **map_tensors(others, suited)))[0]
        return torch.cat([out + more[index] if index < added else out, *more], 2) if added else out

    def _logs(self, tokens: Tensor, before: int = 0) -> list[Tensor]:
        """The log-probabilities [B,T] of the tokens of each answer, from what leaves the language model.

        Of the trial, those of all words [B,2V]. The first `before` tokens are not among these.
        """
        script, found = self.transcript, []
        for places, ids in zip(script.read, script.answers, strict=True):
            logs = log_probabilities(self._words_at(tokens[:, places - before]), Outputs())
            found.append(
                logs.flatten(1).to(tokens.dtype)  # rounded, as the probe expects of its type
                if self.question is None
                else logs.gather(2, ids[None, :, None].expand(len(logs), -1, 1))[..., 0]
            )
        return found

    def _words_at(self, tokens: Tensor) -> Tensor:
        """The logits of all words [...,V] that the language model gives where these tokens leave its last block."""
        net = cast(Any, self.net)
        norm, width = net.get_submodule(f"{self.language_path}.norm"), self.transcript.text.shape[1]
        logits: Tensor = net.lm_head(norm(tokens[..., :width])).float()
        cap = getattr(self.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def lens(self, images: Tensor, ids: Tensor) -> Tensor:
        """The logits [B,S+n,T] of words `ids` [T] at every place of the sequence of images."""
        tokens = self._sequence(self.see_visual(images))
        for index in range(len(self.language_paths)):
            tokens = self._layer(index, tokens, None)
        return torch.cat([self._words_at(part)[..., ids] for part in tokens.split(64, 1)], 1)

    def answer_logs(self, visual: Tensor, keep: Tensor | None = None) -> list[Tensor]:
        """The same for visual tokens [B,n,D], of which only those at `keep` [B,k] are shown."""
        tokens, keys = self._sequence(visual), None
        with torch._C.DisableTorchFunction() if self.at == "tower" else contextlib.nullcontext():
            if keep is not None:
                tokens = tokens.gather(1, self._where(keep, tokens))
                keys = None if torch.is_grad_enabled() else self._keys(tokens)
            before = 0 if keys is None else keys.count
            tokens = tokens[:, before:]
            for index in range(len(self.language_paths)):
                tokens = self._layer(index, tokens, keep, keys)
            return self._logs(tokens, before)

    def _keys(self, like: Tensor) -> Keys | None:
        """Keys and values of the text before the image, for all blocks; None if there is none."""
        script, net = self.transcript, self.net
        if not script.before:
            return None
        keys: Keys | None
        seen, keys = script.keys.get(like.dtype, (None, None))
        if keys is None or seen() is not net:
            keys, none = Keys(), torch.zeros(1, 0, dtype=torch.long, device=like.device)
            tokens = self._sequence(like[:1, :0])
            for index in range(len(self.language_paths)):
                tokens = self._layer(index, tokens, none, keys)
            keys.count = script.before
            script.keys[like.dtype] = weakref.ref(net), keys
        return keys

    def _where(self, keep: Tensor, tokens: Tensor) -> Tensor:
        places = self.transcript.layout.places(keep)
        return places[..., None].expand(-1, -1, tokens.shape[2])

    def plain_logs(self, images: Tensor) -> list[Tensor]:
        """The log-probabilities of the answers by the plain forward of the model."""
        script, found = self.transcript, []
        for ids in script.answers:
            length = len(ids)
            out = self.call(images, torch.cat([script.prompt, ids]), length)
            logs = log_probabilities(out.logits[:, -length - 1 : -1].float(), Outputs())
            found.append(
                logs.flatten(1).to(out.logits.dtype)
                if self.question is None
                else logs.gather(2, ids[None, :, None].expand(len(logs), -1, 1))[..., 0]
            )
        return found

    # the contract

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.sites.blocks if self.at == "tower" else self.sites.heads

    def width_of(self, index: int) -> int:
        if self.at == "tower":
            return super().width_of(index)
        return self.transcript.text.shape[1] * (1 + (self.added or 0))

    @property
    def layout_read(self) -> Layout:
        """How tokens stand at the place it is opened at."""
        return self.fine if self.at == "tower" else self.transcript.layout

    def whole(self, images: Tensor) -> Tensor:
        return self._read(self.plain_logs(images), len(images))

    def _read(self, out: Any, rows: int) -> Tensor:
        if not isinstance(out, list):  # of a forward that was run for its blocks
            return cast(Tensor, out.logits).flatten(1)
        return torch.cat(out, 1) if self.question is None else self.question.logits(out, rows)

    def embed(self, images: Tensor) -> Tensor:
        return super().embed(images) if self.at == "tower" else self._sequence(self.see_visual(images))

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.at == "language":
            return self._layer(index, tokens, positions)
        if not self._packed:
            return super().block(index, tokens, positions)
        self.note_state(index, tokens)
        return self._packed_block(index, tokens, positions)

    def _packed_block(self, index: int, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """A block of a tower that takes the tokens of all images as one list [BN,D], with the borders of windows."""
        call, rows = self.calls[index], len(tokens)
        every = torch.arange(self.fine.count, device=tokens.device).expand(rows, -1)
        places = every if positions is None else self.places(positions)
        order = places.argsort(1)  # windows are contiguous
        sorted_places = places.gather(1, order)
        wide = order[..., None].expand_as(tokens)
        named, borders = dict(call.named), cast(Tensor, call.named["cu_seqlens"])
        window = torch.searchsorted(borders[1:].contiguous(), sorted_places, right=True)
        window = window + len(borders) * torch.arange(rows, device=tokens.device)[:, None]
        counts = window.flatten().unique_consecutive(return_counts=True)[1]
        named["cu_seqlens"] = nn.functional.pad(counts.cumsum(0), (1, 0)).to(borders.dtype)
        named["position_embeddings"] = tuple(
            each.to(tokens.dtype)[sorted_places].flatten(0, 1) for each in named["position_embeddings"]
        )
        out = tensors_in(self.blocks[index](tokens.gather(1, wide).flatten(0, 1), **named))[0].view_as(tokens)
        return torch.empty_like(out).scatter(1, wide, out)

    def flat(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(0, (-1, self.fine.count)) if tokens.ndim == 2 else super().flat(tokens)

    def unflat(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        return tokens.flatten(0, 1) if len(shape) == 2 else super().unflat(tokens, shape)

    def classified(self, tokens: States) -> Tensor:
        return self._answered(tokens, None)

    def classified_at(self, tokens: States, positions: Tensor) -> Tensor:
        return self._answered(tokens, positions)

    def _answered(self, tokens: States, positions: Tensor | None) -> Tensor:
        if self.at == "language":
            return self._read(self._logs(cast(Tensor, tokens)), len(tokens))

        def filled(state: Tensor) -> Tensor:
            if positions is not None:  # the projector reads each square of patches alone: blanks may fill the others
                full = state.new_zeros(len(state), self.fine.count, state.shape[2])
                places = self.fine.places(positions)
                state = full.scatter(1, places[..., None].expand_as(state), state)
            return state.to(self.dtype)  # a widened pass has wider tokens

        visual = self.see_visual(tokens={index: filled(state) for index, state in self._states(tokens).items()})
        return self._read(self.answer_logs(visual, self._groups(positions)), len(visual))

    def _groups(self, positions: Tensor | None) -> Tensor | None:
        """The visual tokens [B,k] of patches at `positions`; an error if a square of patches is not complete."""
        if positions is None or self.merge_size == 1:
            return positions
        squares = self.fine.sets("merge").to(positions.device)[positions]
        counts = squares.new_zeros(len(squares), self.visual).scatter_add(1, squares, torch.ones_like(squares))
        if not bool(((counts == 0) | (counts == self.merge_size**2)).all()):
            raise Unsupported(self._refuse_single())
        return (counts > 0).nonzero()[:, 1].view(len(squares), -1)

    def _refuse_single(self) -> str:
        s = self.merge_size
        return (
            f"{self.name} pools {s} x {s} patches into one visual token, so a single patch cannot be taken out; "
            "unit='merge' works"
        )

    def features(self, tokens: Tensor) -> Tensor:
        return self.classified(tokens)

    def classify(self, features: Tensor) -> Tensor:
        return features

    def parts(self, index: int) -> Parts:
        if self.at == "language":
            return Parts(beyond=_NO_RULE)
        return HuggingFaceAnatomy.parts(cast(Any, self), index)

    def projection(self) -> nn.Module | None:
        return None if self._packed else HuggingFaceAnatomy.projection(cast(Any, self))

    def cannot_remove(self, unit: str) -> str | None:
        return self._stuck if unit == "merge" else self.can_drop

    def end_tokens(self) -> set[int]:
        """The ids that end an answer."""
        sources = (getattr(self.model, "generation_config", None), self.config, self.config.get_text_config())
        found = [getattr(source, "eos_token_id", None) for source in (*sources, self.prompts.tokenizer)]
        return {int(i) for each in found if each is not None for i in (each if isinstance(each, list) else [each])}

    def blank_picture(self, image: Tensor) -> Tensor:
        """A picture of the mean colour of images."""
        return image.mean((2, 3), keepdim=True).expand_as(image)

    _stuck: str | None = None
    """Why no patches can leave the sequence, not even those of a visual token together."""

    def check_droppable(self) -> None:
        if self._stuck is not None:
            raise Unsupported(f"{self.name} cannot drop tokens: {self._stuck}")

    def prepared(self, image: Tensor, size: tuple[int, int] | None = None) -> Self:
        found = super().prepared(image, size)
        if self.at == "language" and found.question is not None:
            found.layout = found.transcript.layout
        return found

    def check(self) -> None:
        if self.bare is None:
            with torch.inference_mode(False), torch.no_grad(), self.steady():
                self.added = self._see_added(random_image(self))
                if self.at == "language":
                    self.layout = self.transcript.layout
                    Anatomy.check(self)
                else:
                    self._check_tower()
                    Anatomy.check(self)

    def _check_tower(self) -> None:
        """Find the order of patches, check that each square makes one visual token, and how patches are dropped."""
        image = random_image(self)
        self.layout = self.fine = replace(self.fine, order=self._see_order(image))
        self.states_read = self._see_states(image)
        tokens = self.run(self.embed(image))
        squares = self.fine.sets("merge")
        picked = torch.arange(self.visual) % 3 == 0
        states = self.states(tokens)
        cells = self.fine.place[picked[squares]].to(tokens.device)
        noise = torch.zeros_like(tokens)
        noise[:, cells] = torch.randn(noise[:, cells].shape, generator=torch.Generator().manual_seed(1)).to(tokens)
        changed = {index: state + noise for index, state in states.items()}
        moved = (self.see_visual(tokens=states) != self.see_visual(tokens=changed)).any(2)[0].cpu()
        if not torch.equal(moved, picked):
            raise Unsupported(f"{self.name} does not make one visual token of each square of patches")
        self._stuck = self._see_absent(tokens)
        self.can_drop = self._stuck or (self._refuse_single() if self.merge_size > 1 else None)

    def _see_added(self, image: Tensor) -> int:
        """Behind how many of its first blocks the language model's forward adds to visual tokens."""
        width = self.transcript.text.shape[1]
        parts = self.see_visual(image).split(width, 2)[1:]
        return max((index + 1 for index, part in enumerate(parts) if bool(part.any())), default=0)

    def _see_states(self, image: Tensor) -> tuple[int, ...]:
        """The states of the tower that visual tokens are made of; empty if only the last."""
        count, tokens, states = len(self.tower_paths), self.embed(image), dict[int, Tensor]()
        for index in range(count):
            states[index] = tokens
            tokens = self.block(index, tokens)
        with torch.enable_grad():
            leaves = {i: state.detach().requires_grad_() for i, state in {**states, count: tokens}.items()}
            visual = self.see_visual(tokens=leaves).sum()
            found = torch.autograd.grad(visual, list(leaves.values()), allow_unused=True)
        read = tuple(index for index, gradient in enumerate(found) if gradient is not None)
        return () if read == (count,) else read

    def _see_order(self, image: Tensor) -> tuple[int, ...] | None:
        """The place of each patch among the tokens, found by changing patches whose number has a bit set."""
        cells = self.fine.cells
        codes = torch.arange(1.0, cells + 1, device=image.device).view(1, *self.fine.grid)
        codes = to_pixels(codes, self.geometry.size, self.geometry.size, "nearest").long()[:, None]
        base = self.embed(image)[0]
        seen = torch.zeros(len(base), dtype=torch.long, device=image.device)
        for bit in range((cells + 1).bit_length()):
            shown = self.embed(torch.where((codes >> bit & 1).bool(), image + 1, image))[0]
            seen = seen + ((shown != base).any(1).long() << bit)
        place = {code - 1: i - self.fine.prefix for i, code in enumerate(seen.tolist()) if code}
        if sorted(place) != list(range(cells)):
            raise Unsupported(f"the patches of {self.name} cannot be located")
        return tuple(place[cell] for cell in range(cells))

    def _see_absent(self, tokens: Tensor) -> str | None:
        """Why patches cannot leave the tower: its blocks must compute the same when they are hidden from attention."""
        if self._packed:
            return None  # windows become shorter
        keep = (self.fine.sets("merge") % 2 == 0).nonzero()[:, 0][None].to(tokens.device)
        for self.masked in (False, True):
            try:
                kept, hidden = self.drop_and_hide(tokens, keep)
            except Exception as error:
                return f"its blocks need every token ({first_line(error)})"
            if alike(hidden, kept, 1e-4):
                return None
        return "its blocks compute other tokens when some are left out than when these are hidden from attention"


@dataclass(frozen=True)
class _Seen:
    """What running a model once shows: grid and number of its tokens, how many blocks are read, and so on."""

    grid: tuple[int, int]
    tokens: int
    visual: int
    read: int
    dead: int
    packed: bool
    heads: int
    trial: list[int]


def _see(anatomy: AnswersAnatomy, model: Any, preprocess: Preprocess, name: str) -> _Seen:
    """Run a copy of the model on a random image."""
    config, copies = model.config, list[nn.Module]()
    Twin(model).renew(copies.append)
    net: Any = copies[0]
    blocks = [net.get_submodule(path) for path in anatomy.tower_paths]
    like = next(p for p in net.parameters() if p.is_floating_point())
    image = torch.randn(1, 3, *preprocess.size, generator=torch.Generator().manual_seed(0)).to(like)
    entered: list[Tensor] = []
    first = blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.inference_mode(False), torch.no_grad():
        try:
            base = _features(net, image)
        except Exception as error:
            raise PatchlightError(
                f"{name} does not take an image of {preprocess.size[0]} x {preprocess.size[1]} pixels: "
                f"{first_line(error)}; give preprocess=pl.Preprocess((height, width))"
            ) from error
        first.remove()
        if len(entered) != 1:
            raise Unsupported(
                f"{name} runs its vision tower {len(entered)} times for one image, which is not supported"
            )
        read = next(
            (i + 1 for i in reversed(range(len(blocks))) if not torch.equal(_noisy(net, blocks[i], image), base)), 0
        )
    tokens, packed = entered[0].shape[-2] if entered[0].ndim == 3 else len(entered[0]), entered[0].ndim == 2
    if entered[0].ndim == 3 and len(entered[0]) > 1:
        raise Unsupported(f"{name} cuts an image into {len(entered[0])} views; give a size that it does not cut")
    patch = config.vision_config.patch_size
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    grid = preprocess.size[0] // patch, preprocess.size[1] // patch
    heads = getattr(config.vision_config, "num_attention_heads", None) or config.vision_config.num_heads
    token = _image_token(config)
    trial = [i for i in range(1, 12) if i != token][:4]
    return _Seen(grid, tokens, len(base), read, len(blocks) - read, packed, heads, trial)


def _noisy(net: Any, block: nn.Module, image: Tensor) -> Tensor:
    """The visual tokens when the output of a block of the tower is changed."""
    hook = block.register_forward_hook(
        lambda block, args, out: map_tensors(out, lambda tokens: tokens * 2 + 1), prepend=True
    )
    try:
        return _features(net, image)
    finally:
        hook.remove()


def _features(net: Any, image: Tensor) -> Tensor:
    """The visual tokens [n,D] of one image."""
    out = net.get_image_features(**_pixels(net.config, image))
    found = tensors_in(getattr(out, "pooler_output", out))
    return torch.cat([each.flatten(0, -2) for each in found])


def _image_token(config: Any) -> int:
    token = getattr(config, "image_token_id", None)
    return int(config.image_token_index if token is None else token)


def _first(model: nn.Module, paths: Sequence[str], name: str) -> str:
    for path in paths:
        with contextlib.suppress(AttributeError):
            model.get_submodule(path)
            return path
    raise Unsupported(f"{name} has none of {', '.join(paths)}")


def _blocks(tower: nn.Module) -> list[str]:
    """The paths of the blocks of a tower: the members of its longest list of modules."""
    lists = {path: module for path, module in tower.named_modules() if isinstance(module, nn.ModuleList)}
    path, modules = max(lists.items(), key=lambda item: len(item[1]))
    return [f"{path}.{i}" for i in range(len(modules))]


def _plain(block: nn.Module) -> bool:
    """Whether a block of a tower has layer norms and an MLP without a gate, which backward rules cover."""
    norms = [module for key, module in block.named_modules() if "norm" in key.rpartition(".")[2]]
    gated = any(key.endswith("gate_proj") for key, _ in block.named_modules())
    return not gated and all(isinstance(norm, nn.LayerNorm) for norm in norms)


def _preprocess(model: Any, processor: Any, name: str) -> Preprocess:
    """The preprocessing of a processor if it has a fixed size, otherwise an assumed one."""
    vision, known = model.config.vision_config, KNOWN[type(model).__name__]
    side = getattr(vision, "image_size", None)
    size = _UNSIZED if side is None else tuple(side) if isinstance(side, list | tuple) else (side, side)
    images = getattr(processor, "image_processor", processor)
    if images is None:
        assumed = replace(known, size=size)
        warn(
            f"{name} came without a processor, so its images are assumed to be squashed to {size[0]} x {size[1]} "
            f"pixels, mean {list(known.mean)}, std {list(known.std)}; give processor= or preprocess=pl.Preprocess(…)",
            AssumedPreprocess,
        )
        return assumed
    try:
        return as_processed(images, 3, name)
    except PatchlightError:  # it cuts pictures, or keeps their size
        mean, std = (tuple(float(v) for v in getattr(images, key)) for key in ("image_mean", "image_std"))
        return replace(SIGLIP, size=size, mean=mean, std=std)


def _pixels(config: Any, images: Tensor) -> dict[str, Any]:
    """Images [B,C,H,W] as a model takes them."""
    kind = config.model_type
    if kind in ("idefics3", "smolvlm"):
        empty = (images == 0).flatten(1).all(1).view(-1, 1, 1, 1)  # the model takes an image of zeros for padding
        return {"pixel_values": (images + empty.to(images) * 1e-6)[:, None]}
    if not kind.startswith("qwen"):
        return {"pixel_values": images}
    vision = config.vision_config
    patch, merge, times = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    count, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    cut = images[..., : rows * patch, : columns * patch]
    cut = cut.reshape(count, channels, rows // merge, merge, patch, columns // merge, merge, patch)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :].expand(*[-1] * 6, times, -1, -1)
    packed = cut.reshape(count * rows * columns, -1)
    grid = torch.tensor([[1, rows, columns]], device=images.device).expand(count, -1)
    return {"pixel_values": packed, "image_grid_thw": grid}


def _run(net: Any, images: Tensor, ids: Tensor, suffix: int) -> Any:
    """Run a model on images and the ids [S] of a prompt, the last `suffix` of which are an answer."""
    config, count = net.config, len(images)
    ids = ids.to(images.device)
    more: dict[str, Any] = {}
    visual = (ids == _image_token(config)).long()
    if config.model_type == "paligemma":  # an answer is the suffix: unmarked, earlier tokens would attend to later ones
        marks = torch.zeros_like(ids)
        marks[len(ids) - suffix :] = 1
        more["token_type_ids"] = marks.expand(count, -1)
    elif config.model_type == "gemma3":
        more["token_type_ids"] = visual.expand(count, -1)
    elif config.model_type.startswith("qwen"):
        more["mm_token_type_ids"] = visual.expand(count, -1)
    return net(input_ids=ids.expand(count, -1), use_cache=False, **_pixels(config, images), **more)


def _axis(value: Tensor, count: int) -> int | None:
    """The axis of an argument of a block that belongs to the tokens: the first of this length behind the batch."""
    return next((axis for axis in range(1, value.ndim) if value.shape[axis] == count), None)


def _join(
    calls: Sequence[Mapping[str, Any]], counts: Sequence[int], owner: Sequence[int], at: Sequence[Tensor], prompt: int
) -> dict[str, Any]:
    """The arguments of a block for the sequences of several runs as one.

    Args:
        calls: The arguments in each run.
        counts: The number of tokens of each.
        owner: The run that each part of the joined sequence is from.
        at: The tokens of each part.
        prompt: The number of tokens of the prompt, which all runs share.
    """
    allowed = [_allowed(call["attention_mask"], count, at[0].device) for call, count in zip(calls, counts, strict=True)]
    rows = []
    for run, here in zip(owner, at, strict=True):
        columns = []
        for other, there in zip(owner, at, strict=True):
            shared = (there < prompt) | (other == run)  # an answer attends to the prompt and itself
            inside = there.clamp(max=counts[run] - 1)
            prompts = (here[:, None] < prompt) & (there[None] >= prompt)
            columns.append(allowed[run][here][:, inside] & shared & ~(prompts & (other != run)))
        rows.append(torch.cat(columns, 1))
    joined: dict[str, Any] = {"attention_mask": torch.cat(rows)}
    for key in calls[0]:
        if key != "attention_mask":
            joined[key] = _join_values([call[key] for call in calls], counts, owner, at)
    return joined


def _join_values(values: Sequence[Any], counts: Sequence[int], owner: Sequence[int], at: Sequence[Tensor]) -> Any:
    leaves = [tensors_in(value) for value in values]
    order = {id(tensor): i for i, tensor in enumerate(leaves[0])}

    def join(tensor: Tensor) -> Tensor:
        axis = _axis(tensor, counts[0])
        if axis is None:
            return tensor
        number = order[id(tensor)]
        return torch.cat(
            [leaves[run][number].movedim(axis, 0)[here].movedim(0, axis) for run, here in zip(owner, at, strict=True)],
            axis,
        )

    return map_tensors(values[0], join)


def _allowed(mask: Tensor | None, count: int, device: torch.device) -> Tensor:
    """Which token attends to which [S,S], of the mask that a block is called with; None is causal attention."""
    if mask is None:
        return torch.ones(count, count, dtype=torch.bool, device=device).tril()
    if mask.ndim != 4:
        raise Unsupported(
            "its language model runs with a kind of attention that is not supported; load it with "
            "attn_implementation='sdpa' or 'eager'"
        )
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > torch.finfo(mask.dtype).min / 2


def _mask(
    script: Transcript, allowed: Tensor, keep: Tensor | None, places: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The additive mask [B or 1,1,m,m] of the kept tokens; blocks after one another share it."""
    for positions, source, kind, mask in tuple(script.recent):
        if positions is keep and source is allowed and kind == dtype:
            return cast(Tensor, mask)
    if places is None:
        shown = allowed[None]
    else:
        shown = allowed[places[:, :, None], places[:, None, :]]
    mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(~shown, torch.finfo(dtype).min)[
        :, None
    ]
    script.recent[:] = [*script.recent[-1:], (keep, allowed, dtype, mask)]
    return mask


@register_family("vision-language models", package="transformers")
def read_vlm(model: nn.Module, **about: Any) -> Anatomy | None:
    """The anatomy of a vision-language model of transformers, or None."""
    name = type(model).__name__
    if name in _TILED:
        raise Unsupported(
            f"{name} cuts an image into tiles and shows each part twice, which is an image in too many tiles to open; "
            f"{', '.join(ANSWERING[:-1])} and {ANSWERING[-1]} work"
        )
    if name not in KNOWN:
        return None
    given = about.get("preprocess")
    if given is not None and not isinstance(given, Preprocess):
        about["preprocess"] = applied(given, lambda: _preprocess(model, about.get("processor"), name))
    return AnswersAnatomy(model, **about)


def create_bundled(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """The bundled model `pocket-vlm`, in float32."""
    from patchlight.anatomy.hf_backbones import create_hf

    model, about = create_hf(replace(request, name=str(BUNDLED)))
    return model.float(), {**about, "name": "pocket-vlm"}


@register_family("pocket-vlm", package="patchlight", create=create_bundled, names=lambda: ("pocket-vlm",))
def read_bundled(model: nn.Module, **about: Any) -> Anatomy | None:
    """None: the bundled model is one of transformers, which `read_vlm` opens."""
    return None

"""Vision-language models: a vision tower, whose patches become visual tokens among the text tokens of a language model.

A model is opened at its tower, or (`place="language"`) at the visual tokens in its language model. Its own forward is
crossed at the blocks of both; the language model runs short sequences with the arguments that it was recorded with.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Parts, States
from patchlight.anatomy.discovery import joined, map_tensors, parted, tensors_in
from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.hf import HuggingFaceAnatomy
from patchlight.anatomy.intercepting import Entered, Site, crossing
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.preprocessing import applied
from patchlight.anatomy.probe import alike, random_image
from patchlight.anatomy.prompts import Prompts
from patchlight.anatomy.tasks import TaskAnatomy
from patchlight.anatomy.texts import check_vocabulary
from patchlight.anatomy.transcript import Keys, Transcript, join_runs, token_axis, variant_mask
from patchlight.anatomy.vlm_calls import (
    KNOWN,
    block_paths,
    first_module,
    has_plain_blocks,
    image_token_of,
    preprocess_of,
    run_prompt,
    tower_facts,
)
from patchlight.anatomy.windows import Windows
from patchlight.core.errors import PatchlightError, Unsupported, first_line
from patchlight.core.images import Preprocess
from patchlight.core.layout import Layout
from patchlight.core.resize import to_pixels
from patchlight.core.targets import Outputs, log_probabilities
from patchlight.zoo import pocket

Place = Literal["tower", "language"]
BUNDLED = Path(pocket.__file__).parent / "pocket-vlm"
"""The folder of the bundled model that answers questions about composed scenes."""
_TOWERS = ("model.vision_tower", "model.vision_model", "model.visual")
_LANGUAGES = ("model.language_model", "model.text_model")
_NO_RULE = "norms and gated MLPs of its language model have no rule yet"


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
        self.opened_at, self.config = place, model.config
        self.prompts = Prompts.of(processor, tokenizer, image_token_of(model.config), name)
        about.setdefault("preprocess", None)
        preprocess = about.pop("preprocess") or preprocess_of(model, processor, name)
        tower, language = (first_module(model, paths, name) for paths in (_TOWERS, _LANGUAGES))
        self.language_path = language
        layers = f"{language}.layers"
        self.tower_paths = [f"{tower}.{path}" for path in block_paths(model.get_submodule(tower))]
        self.language_paths = [f"{layers}.{i}" for i in range(len(model.get_submodule(layers)))]
        facts = tower_facts(model, self.tower_paths, preprocess, name)
        read, self.views, self.visual = max(facts.states), facts.views, len(facts.visual)
        self.image_tokens, self._visual_places = facts.image_tokens, facts.visual
        self.language_width = int(model.config.get_text_config().hidden_size)
        dead = len(self.tower_paths) - read
        self.tower_paths = self.tower_paths[:read]
        grid, self.prompts = facts.grid, replace(self.prompts, tiled=facts.views > 1)
        patches = self.views * math.prod(grid)
        merge = round(math.sqrt(patches / self.visual))
        if merge**2 * self.visual != patches:
            raise Unsupported(
                f"{name} makes {self.visual} visual tokens of {grid[0]} x {grid[1]} patches, which is not "
                "one of each square of patches"
            )
        self.merge_size = merge
        self.fine = Layout(grid, facts.tokens - patches, order=facts.order, merge=merge)
        self.coarse = Layout((grid[0] // merge, grid[1] // merge))
        at_tower = {"grid": grid, "prefix": self.fine.prefix, "order": facts.order, "windows": self.views}
        own = at_tower if place == "tower" else {"grid": self.coarse.grid, "prefix": 0}
        self._blank_ids = torch.tensor([*[image_token_of(model.config)] * self.image_tokens, *facts.trial])
        self.head_paths = self.language_paths
        self.spared = (language, "lm_head")
        self.packed = facts.packed and place == "tower"
        super().__init__(
            model,
            paths=self.tower_paths,
            attentions=self.tower_paths,
            name=name,
            preprocess=preprocess,
            heads=facts.heads,
            **own,
            **about,
        )
        self.can_decompose = _NO_RULE
        self._one_blank = False
        if self.windows > 1:
            tokens = torch.arange(float(self.fine.count))[None, :, None]
            self.reaches = [Windows(self.unflat(tokens, (1, 1, 1))[..., 0].long())] * read
            self.watch_reaches()
        if place == "language":
            self.sinks = (
                "language models often attend to their first tokens (attention sinks), whatever the image shows; "
                "'genatt', which weights attention by its gradient, and 'ixg' work better"
            )
        if place == "language" or not has_plain_blocks(model.get_submodule(self.tower_paths[0])):
            self.can_rule = _NO_RULE if place == "language" else "norms and gated MLPs of its tower have no rule yet"
        elif dead:
            self.note = f"the vision tower of {name} reads block {read - 1} last: blocks behind it do nothing"
        self._tower_states = () if facts.states == (read,) else facts.states

    note = ""
    """What a user should know about how it was opened."""

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + (f"; {self.note}>" if self.note else ">")

    def wide(self) -> Self:
        """With a tower in float32; in its language model nothing needs more than the model's own type."""
        mixes = self.config.model_type != "smolvlm"  # its forward does not cast what leaves the tower
        return super().wide() if self.opened_at == "tower" and mixes else self

    def default_question(self) -> Any:
        raise PatchlightError(
            f"{self.name} generates answers, so it needs a prompt: head=pl.heads.Answer('what is …'), or --prompt of "
            "the command line"
        )

    # the image

    def blank(self, count: int) -> Tensor:
        return torch.ones(count, *self.input_shape, device=self.device, dtype=self.dtype)

    def call(self, images: Tensor, ids: Tensor | None = None, suffix: int = 0) -> Any:
        """Run the twin on images and the ids [S] of a prompt, the last `suffix` of which are an answer."""
        ids = self._blank_ids if ids is None else ids
        return run_prompt(self.net, images, ids, suffix)

    # the sequence of the language model

    @property
    def transcript(self) -> Transcript:
        """The sequence that the language model reads: that of the question, or a trial."""
        asked = getattr(self.question, "transcript", None)
        if asked is not None:
            return cast(Transcript, asked)
        cache, key = self.running.prepared, ("trial", self.opened_at)
        if key not in cache:
            ids = self._blank_ids.tolist()
            cache[key] = self.transcribe(ids[:-2], [ids[-2:]])
        return cast(Transcript, cache[key])

    @torch.no_grad()
    def transcribe(self, prompt: Sequence[int], answers: Sequence[Sequence[int]], question: Any = None) -> Transcript:
        """Run the model on a prompt with each answer, and record what enters the blocks of its language model.

        A question may have other images; their tokens do not change, so they count as text.
        """
        for answer in answers:
            check_vocabulary(torch.tensor(answer), self.net.get_input_embeddings().num_embeddings, self.name)
        ids = [torch.tensor([*prompt, *answer], device=self.device) for answer in answers]
        blank, position = self.blank(1), 0
        if question is not None:
            blank, position = question.beside(blank), question.position
        runs = [self._record_calls(each, len(answer), blank) for each, answer in zip(ids, answers, strict=True)]
        places = (ids[0][: len(prompt)] == image_token_of(self.config)).nonzero()[:, 0]
        visual = places.view(-1, self.image_tokens)[position, self._visual_places.to(places.device)]
        return join_runs(runs, ids, len(prompt), visual, self.coarse)

    def _record_calls(self, ids: Tensor, suffix: int, blank: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
        """What enters the language model for blank images, as in `visual_tokens`, and the arguments of each block."""
        sites, entered, calls = self.sites, list[Tensor](), list[dict[str, Any]]()

        def at(site: Site) -> Any:
            if any(site.module is layer for layer in sites.heads):
                entered.append(site.tokens)
                calls.append({key: value for key, value in site.kwargs.items() if key != site.keyword})
                if len(site.args) > 1 or "attention_mask" not in site.kwargs:
                    raise Unsupported(f"the language model of {self.name} is called in a way that is not supported")
                return torch.zeros_like(site.tokens)
            return site.run()

        with crossing(at):
            self.call(blank, ids, suffix)
        return torch.cat(entered[: 1 + (self.added or 0)], 2), calls

    def visual_tokens(self, images: Tensor | None = None, tokens: States | None = None) -> Tensor:
        """The visual tokens [B,n,D] that enter the language model, of images or of the states of the tower.

        What its forward adds to them behind its first blocks stands in further channels [B,n,(1+added)D].
        """
        sites, entered = self.sites, list[Tensor]()

        def stop(number: int | None, site: Site) -> Any:
            if not any(site.module is layer for layer in sites.heads):
                return site.run()
            all_tokens = site.tokens[:, : self.image_tokens]
            ends_lines = self.visual < self.image_tokens
            entered.append(all_tokens[:, self._visual_places.to(all_tokens.device)] if ends_lines else all_tokens)
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
        """Text and visual tokens [B,S+n,D]."""
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
        mask = variant_mask(script, named["attention_mask"], keep, places, tokens.dtype)
        others = {key: value for key, value in named.items() if key != "attention_mask"}
        if keys is not None:
            others["past_key_values"], mask = keys, mask[:, :, keys.count :]
            places = None if places is None else places[:, keys.count :]

        def suited(value: Tensor) -> Tensor:
            axis = token_axis(value, script.layout.count)
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
        script = self.transcript
        return [
            self._logs_of(self._words_at(tokens[:, places - before]), ids, tokens.dtype)
            for places, ids in zip(script.read, script.answers, strict=True)
        ]

    def _logs_of(self, logits: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The log-probabilities [B,T] of tokens; of the trial those of all words, rounded as the probe expects."""
        logs = log_probabilities(logits.float(), Outputs())
        if self.question is None:
            return logs.flatten(1).to(dtype)
        return logs.gather(2, ids[None, :, None].expand(len(logs), -1, 1))[..., 0]

    def _words_at(self, tokens: Tensor) -> Tensor:
        """The logits of all words [...,V] that the language model gives where these tokens leave its last block."""
        net = cast(Any, self.net)
        norm = net.get_submodule(f"{self.language_path}.norm")
        logits: Tensor = net.lm_head(norm(tokens[..., : self.language_width])).float()
        cap = getattr(self.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def lens(self, images: Tensor, ids: Tensor) -> Tensor:
        """The logits [B,S+n,T] of words `ids` [T] at every place of the sequence of images."""
        tokens = self._sequence(self.visual_tokens(images))
        for index in range(len(self.language_paths)):
            tokens = self._layer(index, tokens, None)
        return torch.cat([self._words_at(part)[..., ids] for part in tokens.split(64, 1)], 1)

    def answer_logs(self, visual: Tensor, keep: Tensor | None = None) -> list[Tensor]:
        """The same for visual tokens [B,n,D], of which only those at `keep` [B,k] are shown."""
        tokens, keys = self._sequence(visual), None
        with torch._C.DisableTorchFunction() if self.opened_at == "tower" else contextlib.nullcontext():
            if keep is not None:
                places = self.transcript.layout.places(keep)[..., None]
                tokens = tokens.gather(1, places.expand(-1, -1, tokens.shape[2]))
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

    def plain_logs(self, images: Tensor) -> list[Tensor]:
        """The log-probabilities of the answers by the plain forward of the model."""
        script, found = self.transcript, []
        for ids in script.answers:
            length = len(ids)
            shown = images if self.question is None else cast(Any, self.question).beside(images)
            out = self.call(shown, torch.cat([script.prompt, ids]), length)
            found.append(self._logs_of(out.logits[:, -length - 1 : -1], ids, out.logits.dtype))
        return found

    # the contract

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.sites.blocks if self.opened_at == "tower" else self.sites.heads

    def width_of(self, index: int) -> int:
        if self.opened_at == "tower":
            return super().width_of(index)
        return self.language_width * (1 + (self.added or 0))

    def model_output(self, images: Tensor) -> Tensor:
        return self._read(self.plain_logs(images), len(images))

    def _read(self, out: Any, rows: int) -> Tensor:
        if not isinstance(out, list):  # of a forward that was run for its blocks
            return cast(Tensor, out.logits).flatten(1)
        return torch.cat(out, 1) if self.question is None else self.question.logits(out, rows)

    def embed(self, images: Tensor) -> Tensor:
        return super().embed(images) if self.opened_at == "tower" else self._sequence(self.visual_tokens(images))

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.opened_at == "language":
            return self._layer(index, tokens, positions)
        if not self.packed:
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
        out: Tensor = tokens.unflatten(0, (-1, self.fine.count)) if tokens.ndim == 2 else tokens
        return out if tokens.ndim == 2 else joined(out, self.views, self.fine.prefix // self.views)

    def unflat(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        return tokens.flatten(0, 1) if len(shape) == 2 else parted(tokens, self.views, self.fine.prefix // self.views)

    def classified(self, tokens: States) -> Tensor:
        return self._answered(tokens, None)

    def classified_at(self, tokens: States, positions: Tensor) -> Tensor:
        return self._answered(tokens, positions)

    def _answered(self, tokens: States, positions: Tensor | None) -> Tensor:
        if self.opened_at == "language":
            return self._read(self._logs(cast(Tensor, tokens)), len(tokens))

        def filled(state: Tensor) -> Tensor:
            if positions is not None:  # the projector reads each square of patches alone: blanks may fill the others
                full = state.new_zeros(len(state), self.fine.count, state.shape[2])
                places = self.fine.places(positions)
                state = full.scatter(1, places[..., None].expand_as(state), state)
            return state.to(self.dtype).contiguous()  # a widened pass has wider tokens; models take views of them

        visual = self.visual_tokens(tokens={index: filled(state) for index, state in self._states(tokens).items()})
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
        if self.opened_at == "language":
            return Parts(beyond=_NO_RULE)
        return HuggingFaceAnatomy.parts(cast(Any, self), index)

    def projection(self) -> nn.Module | None:
        return HuggingFaceAnatomy.projection(cast(Any, self))

    def cannot_remove(self, unit: str) -> str | None:
        return self._cannot_drop if unit == "merge" else self.can_drop

    def end_tokens(self) -> set[int]:
        """The ids that end an answer."""
        sources = (getattr(self.model, "generation_config", None), self.config, self.config.get_text_config())
        found = [getattr(source, "eos_token_id", None) for source in (*sources, self.prompts.tokenizer)]
        return {int(i) for each in found if each is not None for i in (each if isinstance(each, list) else [each])}

    _cannot_drop: str | None = None
    """Why no patches can leave the sequence, not even those of a visual token together."""

    def check_droppable(self) -> None:
        if self._cannot_drop is not None:
            raise Unsupported(f"{self.name} cannot drop tokens: {self._cannot_drop}")

    def prepared(self, image: Tensor, size: tuple[int, int] | None = None) -> Self:
        found = super().prepared(image, size)
        if self.opened_at == "language" and found.question is not None:
            found.layout = found.transcript.layout
        return found

    def check(self) -> None:
        if self.bare is None:
            with torch.inference_mode(False), torch.no_grad(), self.steady():
                image = random_image(self)
                self.added = self._count_added(image)
                if self.opened_at == "tower" and self.views == 1:
                    self.layout = self.fine = replace(self.fine, order=self._find_order(image))
                if self.opened_at == "tower" or self.views > 1:
                    self.coarse = replace(self.coarse, order=self._find_visual_order())
                if self.opened_at == "language":
                    self.layout = self.transcript.layout
                else:
                    self.states_read = self._tower_states
                    self._cannot_drop = self._why_not_removed(self.embed(image))
                    self.can_drop = self._cannot_drop or (self._refuse_single() if self.merge_size > 1 else None)
                Anatomy.check(self)

    def _find_visual_order(self) -> tuple[int, ...]:
        """The visual tokens of each square of patches, found by changing the squares whose number has a bit set."""
        noise = torch.randn(2, self.fine.count, self.calls[0].fed[-1], generator=torch.Generator().manual_seed(1))
        noise, indices = self.place(noise), self._tower_states or (len(self.tower_paths),)
        squares = self.fine.of_tokens(1 + self.fine.sets("merge")[None].to(noise.device))
        before = self.visual_tokens(tokens=dict.fromkeys(indices, noise[:1]))

        def moved(chosen: Tensor) -> Tensor:
            changed = noise[:1] + noise[1:] * chosen[0, :, None].to(noise)
            return (self.visual_tokens(tokens=dict.fromkeys(indices, changed)) != before).any(2)[0]

        order = _places(moved, squares, self.coarse.cells)
        if order is None:
            raise Unsupported(f"{self.name} does not make one visual token of each square of patches")
        return order

    def _count_added(self, image: Tensor) -> int:
        """Behind how many of its first blocks the language model's forward adds to visual tokens."""
        parts = self.visual_tokens(image).split(self.language_width, 2)[1:]
        return max((index + 1 for index, part in enumerate(parts) if bool(part.any())), default=0)

    def _find_order(self, image: Tensor) -> tuple[int, ...] | None:
        """The place of each patch among the tokens, found by changing patches whose number has a bit set."""
        cells = self.fine.cells
        codes = torch.arange(1.0, cells + 1, device=image.device).view(1, *self.fine.grid)
        codes = to_pixels(codes, self.geometry.size, self.geometry.size, "nearest").long()[:, None]
        base = self.embed(image)[0, self.fine.prefix :]

        def moved(chosen: Tensor) -> Tensor:
            return (self.embed(torch.where(chosen, image + 1, image))[0, self.fine.prefix :] != base).any(1)

        order = _places(moved, codes, cells)
        if order is None:
            raise Unsupported(f"the patches of {self.name} cannot be located")
        return order

    def _why_not_removed(self, tokens: Tensor) -> str | None:
        """Why patches cannot leave the tower: its blocks must compute the same when they are hidden from attention."""
        if self.views > 1:
            return (
                f"it shows each part of an image in {self.fine.per_cell} patches of {self.views} views; unit='patch' "
                "paints them all, and place='language' removes all visual tokens of a part"
            )
        if self.packed:
            return None  # windows become shorter
        keep = (self.fine.sets("merge") % 2 == 0).nonzero()[:, 0][None].to(tokens.device)
        for self.masked in (False, True):
            try:
                kept, hidden = self.drop_and_hide(tokens, keep)
            except Exception as error:
                return f"its blocks need every token ({first_line(error)})"
            if alike(hidden, kept, 1e-4):
                return None
        return "removing tokens gives another result than masking them in attention"


def _places(moved: Callable[[Tensor], Tensor], numbers: Tensor, cells: int) -> tuple[int, ...] | None:
    """The places of the tokens of each cell; None if a token belongs to several cells, or cells to unequally many.

    Args:
        moved: Which tokens change if what is chosen changes.
        numbers: The number of the cell, from 1, of everything that can be chosen.
        cells: The number of cells.
    """
    seen = torch.stack([moved((numbers >> bit & 1).bool()).long() << bit for bit in range(cells.bit_length())]).sum(0)
    counts = seen.bincount(minlength=cells + 1)
    if len(counts) > cells + 1 or int(counts[0]) or int(counts[1:].min()) != int(counts.max()):
        return None
    return tuple(seen.argsort(stable=True).tolist())


@register_family("vision-language models", package="transformers")
def read_vlm(model: nn.Module, **about: Any) -> Anatomy | None:
    """The anatomy of a vision-language model of transformers, or None."""
    name = type(model).__name__
    if name not in KNOWN:
        return None
    given = about.get("preprocess")
    if given is not None and not isinstance(given, Preprocess):
        about["preprocess"] = applied(given, lambda: preprocess_of(model, about.get("processor"), name))
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

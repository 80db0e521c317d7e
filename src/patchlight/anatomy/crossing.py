"""Crossing: a model's own forward, run and intercepted where it calls its blocks.

Nothing of a model is written again. `embed` is the forward until the first block is called. `classified` is the forward
on a blank input, where the last block returns the given tokens and all others are skipped. What a forward does between
two blocks is the forward on a blank from the output of one to the input of the other.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Parts, Pooling, States
from patchlight.anatomy.discovery import Stages, joined, map_tensors, parted, tensors_in
from patchlight.anatomy.intercepting import (
    BlockCall,
    Entered,
    Flowing,
    KeptScores,
    Site,
    Sites,
    crossing,
    gathered,
    make_skippable,
    part_blocks,
)
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.probe import BY_HAND, alike, distance, quantised_layer, random_image, refused_input
from patchlight.anatomy.watching import AttentionTap, Unseen, watch_reach
from patchlight.anatomy.windows import Bins, Merging, Pooled, Reach, Windows
from patchlight.core.errors import PatchlightError, Unsupported, first_line


class CrossedAnatomy(Anatomy):
    """A model opened at `paths`, the modules that are its blocks, in the order in which its forward calls them.

    Subclasses may define `call`, how the model is run, `logits_of`, where its output has the logits, and `head_paths`,
    its classifiers. The probe finds which tokens the logits depend on, where the forward does something between two
    blocks, and whether tokens can be dropped.
    """

    channels_last = True
    """Whether maps that its blocks take or return are [B,h,w,D]."""
    blocks_name = "blocks"
    """What the blocks are called in errors."""
    head_paths: Sequence[str] = ()
    """The classifiers, whose input is the features that other heads read."""

    def __init__(
        self,
        model: nn.Module,
        *,
        paths: Sequence[str],
        stages: Stages | None = None,
        pools: bool = False,
        attentions: Sequence[str] = (),
        stage: int | None = None,
        windows: int = 1,
        **facts: Any,
    ) -> None:
        self.stage, self.windows = stage, windows
        self.paths, self.pools, self.attentions = list(paths), pools, list(attentions)
        self.reaches: list[Reach | None] = []
        """Which tokens the attention of each block connects, if not all with all."""
        self.stages, self.hierarchical = stages, stages is not None
        if stages is not None and stages.late:
            self.can_attend = "a token is added in a later stage"
        self.breaks: frozenset[int] = frozenset()
        """Blocks whose input is not the output of the block before."""
        self.beyond = ""
        """What the blocks do beside the attention and MLP of a plain block; "" where that is all."""
        self.masked = False
        """Whether attention inside the blocks has a mask or bias over all tokens, to be restricted to the kept ones."""
        self._one_blank = True
        self._freezes = True
        """Whether its forward uses `no_grad`."""
        self._pooling_given = "pooling" in facts
        super().__init__(model, **{"pooling": "cls", "heads": 1, "classes": 1, **facts})

    @property
    def stage_end(self) -> int:
        return 0 if self.stages is None else self.stages.end

    @property
    def tokens_read(self) -> int:
        return self.tokens if self.stages is None else self.stages.tokens[-1]

    def width_of(self, index: int) -> int:
        return self.calls[index].fed[-1]

    def merging(self, index: int) -> Merging | None:
        inside = 0 < index < self.depth or index == len(self.paths)  # neurons are read before patches are merged
        return self.stages.merging(index) if self.stages is not None and inside else None

    @property
    def sites(self) -> Sites:
        """The blocks and classifiers of the twin."""
        running = self.running
        if running.sites is None or running.sites.net is not running.net:
            part_blocks(running.net, self.paths)
            blocks, heads = (
                [running.net.get_submodule(path) for path in paths] for paths in (self.paths, self.head_paths)
            )
            running.sites = Sites(running.net, blocks, heads)
        sites: Sites = running.sites
        return sites

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.sites.blocks

    @property
    def calls(self) -> list[BlockCall]:
        """How the forward calls its blocks, seen with a blank input."""
        sites, key = self.sites, None if self.question is None else self.question.call_key
        if key not in sites.calls:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                self.own_cast(),
                sites.noting_stem(key, self.paths[0]),
            ):
                sites.blank = torch.zeros(1, *self.input_shape, device=self.device, dtype=self.dtype)
                sites.calls[key] = self.record(sites.blank)[1]
        return sites.calls[key]

    @property
    def stem(self) -> list[tuple[nn.Module, Any]]:
        """The modules that run before the first block, and what they returned for a blank input."""
        return self.sites.stems[None if self.question is None else self.question.call_key] if self.calls else []

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Also see how the forward calls its blocks, before taps watch them, and forget the states noted inside."""
        before = getattr(_LOCAL, "trail", None)
        with super().steady():
            self.record_calls()
            try:
                yield
            finally:
                _LOCAL.trail = before

    def record_calls(self) -> None:
        """Record the calls of the blocks for the twin as it is now."""
        assert len(self.calls) == len(self.paths)

    def watch(self) -> None:
        super().watch()
        self.make_skippable()
        self.watch_reaches()

    def watch_reaches(self) -> None:
        """Register the windows of each attention with taps."""
        for path, reach in zip(self.attentions, self.reaches, strict=False):
            if reach is not None:
                attention: Any = self.net.get_submodule(path)
                cuts_itself = hasattr(attention, "ws")  # Twins: its projection gets the tokens in order
                watch_reach(attention, reach.to(self.device), attention.proj if cuts_itself else None)

    def make_skippable(self) -> None:
        """Let the forward of the twin be intercepted at its blocks and classifiers."""
        for module in (*self.sites.blocks, *self.sites.heads):
            make_skippable(module)

    def call(self, images: Tensor) -> Any:
        """Run the twin as its users run the model."""
        return self.net(images)

    def logits_of(self, out: Any, rows: int) -> Tensor:
        """The logits [rows,C] in the output of the model."""
        return tensors_in(getattr(out, "logits", out))[0]

    def run_model(self, images: Tensor) -> Any:
        """The output of the model for images, as the question runs it."""
        return self.call(images) if self.question is None else self.question.call(self, images)

    def _read(self, out: Any, rows: int) -> Tensor:
        """The logits of the head in the output of the model."""
        return self.logits_of(out, rows) if self.question is None else self.question.logits(out, rows)

    def model_output(self, images: Tensor) -> Tensor:
        return self._read(self.run_model(images), len(images))

    def embed(self, images: Tensor) -> Tensor:
        return self._enter(0, images, images)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        call, block = self.calls[index], self.blocks[index]
        if index not in self.breaks:
            self.note_state(index, tokens)
        tokens = self.unflat(tokens, call.fed)
        if positions is None:
            return self.flat(call.run(block, tokens))
        places = self.places(positions)
        inside = self.masked and places.shape[1] == self.tokens  # masks of all tokens, gathered where they are added
        with KeptScores(places, self.tokens) if self.masked else contextlib.nullcontext():
            keep_places = partial(gathered, places=places, keep=positions, count=self.tokens, pairs=not inside)
            return call.run(block, tokens, lambda value: map_tensors(value, keep_places), self.dropping(positions))

    def dropping(self, positions: Tensor) -> dict[str, Tensor]:
        """Arguments that a block needs beside those of the forward when only the cells at `positions` are left."""
        return {}

    def changes(self, index: int) -> bool:
        return index in self.breaks

    def merge(self, index: int, tokens: Tensor) -> Tensor:
        if index not in self.breaks:
            return tokens
        self.note_state(index, tokens)
        return self._enter(index, tokens, self.blank(len(tokens)))

    def note_state(self, index: int, tokens: Tensor) -> None:
        """Note the tokens x_index of a run that enter a block, if the readout reads those of several blocks."""
        if not self.several_states:
            return
        trail: _Trail | None = getattr(_LOCAL, "trail", None)
        if index == 0:
            trail = _LOCAL.trail = _Trail(self.model)
        elif trail is None or trail.model is not self.model or trail.index != index - 1:
            _LOCAL.trail = None
            return
        trail.index = index
        if index in self.reads:
            trail.states[index] = tokens

    def states(self, tokens: Tensor) -> dict[int, Tensor]:
        if not self.several_states:
            return {len(self.paths): tokens}
        trail: _Trail | None = getattr(_LOCAL, "trail", None)
        usable = trail is not None and trail.model is self.model and trail.index == len(self.paths) - 1
        noted = {**(trail.states if trail is not None and usable else {}), len(self.paths): tokens}
        if any(index not in noted or len(noted[index]) != len(tokens) for index in self.reads):
            raise Unsupported(
                f"{self.name} reads the tokens of blocks {', '.join(str(i - 1) for i in self.reads)}, but not all of "
                "these blocks have run on these tokens; run all blocks and the readout inside one `steady`"
            )
        return {index: noted[index] for index in self.reads}

    def classified(self, tokens: Any) -> Tensor:
        return self._behind(tokens)

    def features(self, tokens: Any) -> Tensor:
        """The input of the classifier, or the mean of the inputs of several; the logits if there is none."""
        inputs: list[Tensor] = []
        if not self.head_paths:
            return self.classified(tokens)
        self._behind(tokens, see=inputs.append)
        return inputs[0] if len(inputs) == 1 else torch.stack(inputs).mean(0)

    def classify(self, features: Tensor) -> Tensor:
        outputs = [head(features) for head in self.sites.heads]
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(0) if outputs else features

    def record(self, images: Tensor) -> tuple[Any, list[BlockCall], list[Tensor]]:
        """The output of the plain forward, the calls of its blocks, and the tokens that enter them."""
        sites, calls, inputs, order = self.sites, list[BlockCall](), list[Tensor](), list[int | None]()

        def see(site: Site) -> Any:
            out = site.run()
            index = sites.index(site.module)
            if index is not None:
                order.append(index)
                calls.append(site.recorded(out))
                inputs.append(self.flat(site.tokens))
            return out

        try:
            with crossing(see):
                out = self.run_model(images)
        except Exception as error:
            raise refused_input(self.name, images.shape, error) from error
        depth, count = len(self.paths), len(order)
        if order != list(range(depth)):
            often = (
                f"runs its {self.blocks_name} {count // depth} times for one image, and only one run can be opened"
                if count and order == list(range(depth)) * (count // depth)
                else f"calls the blocks of its {self.blocks_name} {count} times for one image, but there are {depth}"
            )
            raise PatchlightError(f"{self.name} {often}; wrap a module that runs it once, or {BY_HAND}")
        return out, calls, inputs

    def blank(self, count: int) -> Tensor:
        """A blank input for the states of `count` images; one is enough unless the forward reads the batch size."""
        blank = self.sites.blank
        if self._one_blank and blank is not None:
            return blank
        return torch.zeros(count, *self.input_shape, device=self.device, dtype=self.dtype)

    def blank_of(self, tokens: Tensor) -> Tensor | None:
        """A blank input for these tokens, if their number needs another than `blank`."""
        return None

    def replay(
        self, states: Mapping[int, Tensor], last: int, at: Callable[[int | None, Site], Any], blank: bool = True
    ) -> Callable[[Site], Any]:
        """What to do where a forward (on a `blank` input) calls a module: blocks up to `given` return the states.

        The stem and blocks without a state return what they did for the blank. `at` runs the rest: it gets the number
        of a block after `given`, or None.
        """
        sites, calls, single = self.sites, self.calls if last >= 0 else [], self._one_blank and blank
        stem = iter(self.stem if single else ())
        waiting = next(stem, None)

        def skip(site: Site) -> Any:
            nonlocal waiting
            if waiting is not None and site.module is waiting[0]:
                (_, out), waiting = waiting, next(stem, None)
                return out
            number = sites.index(site.module)
            if number is None or number > last:
                return at(number, site)
            call = calls[number]
            if number + 1 in states:
                out = self.answer(call, states[number + 1])
            else:
                out = call.returned if single else call.blank(site.tokens)
            enters = number in states and number not in self.breaks
            site.capture(self.unflat(states[number], call.fed) if enters else site.tokens, out)
            return out

        return skip

    def answer(self, call: BlockCall, tokens: Tensor) -> Any:
        """What a block returns that gives these tokens."""
        return call.answer(self.unflat(tokens, tensors_in(call.returned)[0].shape))

    def _enter(self, index: int, tokens: Tensor, images: Tensor) -> Tensor:
        """The tokens that enter a block, given the output of the block before; for block 0, of these images."""

        def stop(number: int | None, site: Site) -> Any:
            if number is None:
                return site.run()
            raise Entered(site.tokens)

        return self.flat(self.stopped(images, self.replay({index: tokens}, index - 1, stop, index > 0), index > 0))

    def stopped(self, images: Tensor, at: Callable[[Site], Any], blank: bool = False) -> Tensor:
        """The tokens at which `at` stops the forward."""
        try:
            with self.intercepted(at, blank):
                self.run_model(images)
        except Entered as entered:
            return entered.tokens
        raise PatchlightError(f"the forward of {self.name} does not call the blocks of its {self.blocks_name}")

    def _behind(
        self, tokens: States, images: Tensor | None = None, see: Callable[[Tensor], None] = lambda features: None
    ) -> Tensor:
        """The logits of the forward when its blocks are skipped and return the states, or the last the `tokens`.

        `see` gets the input of each classifier.
        """
        states = self.states(tokens) if isinstance(tokens, Tensor) else tokens
        rows = len(next(iter(states.values())))

        def run(number: int | None, site: Site) -> Any:
            if any(site.module is head for head in self.sites.heads):
                see(site.tokens)
            return site.run()

        images = self.blank_of(states[max(states)]) if images is None else images
        at = self.replay(states, len(self.paths) - 1, run, images is None)
        with self.intercepted(at, True):
            return self._read(self.run_model(self.blank(rows) if images is None else images), rows)

    def _flowing(self) -> contextlib.AbstractContextManager[Any]:
        """Let gradients flow through a forward that uses `no_grad`."""
        return Flowing() if self._freezes and torch.is_grad_enabled() else contextlib.nullcontext()

    @contextlib.contextmanager
    def intercepted(self, at: Callable[[Site], Any], blank: bool) -> Iterator[None]:
        """Intercept a forward; the projected patches of a `blank` image are hidden from taps."""
        hides = blank and not self._one_blank and self.projection() is not None
        with crossing(at), self._flowing(), self.projecting(None) if hides else contextlib.nullcontext():
            yield

    def flat(self, tokens: Tensor) -> Tensor:
        """Cells of a map, or tokens of windows in the batch axis, as tokens [B,N,D]."""
        if tokens.ndim == 3:
            return joined(tokens, self.windows, self.prefix // self.windows)
        return tokens.flatten(1, -2) if self.channels_last else tokens.flatten(2).mT

    def unflat(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        """Tokens [B,N,D] as a map of this shape, or in windows."""
        if len(shape) == 3:
            return parted(tokens, self.windows, self.prefix // self.windows)
        last = self.channels_last
        shaped: Tensor = tokens.unflatten(1, tuple(shape[1:-1])) if last else tokens.mT.unflatten(2, tuple(shape[2:]))
        return shaped

    def check(self) -> None:
        """Check that the forward can be crossed at its blocks, then check it like every model."""
        stops = None if self.bare is not None else self._cross()
        super().check()
        self.gradient = self.gradient or stops

    def _cross(self) -> str | None:
        """Compare parts and whole, and find the pooling; returns why no gradient flows there, or None."""
        with torch.inference_mode(False), torch.no_grad(), self.steady():
            image = random_image(self)
            with Flowing() as flow:
                out, calls, inputs = self.record(image)
                expected = self._read(out, len(image))
            self._freezes = flow.used
            self.check_constants(calls)
            outputs = [self.flat(tensors_in(call.returned)[0]) for call in calls]
            self.breaks = frozenset(i for i in range(1, len(calls)) if not torch.equal(inputs[i], outputs[i - 1]))
            tokens = self.embed(image)
            if tokens.ndim != 3 or tokens.shape[1] != self.tokens:  # reported for every model
                return None
            if (self.stages is not None or self.windows > 1) and not self.reaches:
                self.reaches = [self._find_reach(index, inputs[index]) for index in range(len(calls))]
                self.watch_reaches()
            last = self.run(tokens)
            self.beyond = self._find_beyond(inputs[-1])
            self.states_read = ()
            self._compare(expected, last, [inputs[0], *outputs], image)
            last = self.run(tokens) if self.several_states else last
            self._check_batches(outputs, last)
            self.can_drop = type(self).can_drop or self.why_not_drop(tokens)
            return self._find_pooling(last)

    def _find_reach(self, index: int, tokens: Tensor) -> Reach | None:
        """Which tokens the attention of a block connects; None if all, or if it cannot be found.

        Changing the tokens whose number has a bit set changes the scores of exactly the windows' places that hold them.
        """
        count, tap = tokens.shape[1], ScoreTap()

        def scores(changed_tokens: Tensor) -> Tensor | None:
            with tap:
                self.block(index, changed_tokens)
            return tap.scores if tap.scores is None or tap.scores.ndim == 4 else tap.scores.flatten(0, 1)

        try:
            base = scores(tokens)
            if base is None or (base.shape[-2:] == (count, count) and self.windows == 1):
                return None
            if base.shape[-1] != base.shape[-2]:
                return self._find_pooled(index, base)
            noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1)).to(tokens)
            numbers = torch.arange(1, count + 1, device=tokens.device)
            codes = torch.zeros(len(base), base.shape[-1], dtype=torch.long, device=tokens.device)
            for bit in range((count + 1).bit_length()):
                shown = scores(tokens + noise * (numbers >> bit & 1)[None, :, None].to(tokens))
                changed = (cast(Tensor, shown) != base).diagonal(dim1=-2, dim2=-1).any(1)
                codes += changed.long() << bit
        except Unsupported:
            return None
        if sorted(codes[codes > 0].tolist()) != numbers.tolist():
            return None
        allowed = base.softmax(-1).amax(1) > 1e-30  # a mask of large negative numbers, or of infinity
        return Windows((codes - 1).cpu(), None if bool(allowed.all()) else allowed.cpu())

    def _find_pooled(self, index: int, scores: Tensor) -> Reach | None:
        """Attention to tokens that a convolution inside the block merges."""
        grid = cast(Stages, self.stages).grids[index]
        for module in self.blocks[index].modules():
            step = int(module.stride[0]) if isinstance(module, nn.Conv2d) else 1
            coarse = grid[0] // step, grid[1] // step
            if step > 1 and tuple(scores.shape[-2:]) == (math.prod(grid), math.prod(coarse)):
                return Pooled(Merging((grid[0], grid[1]), coarse, step, step))
            side = cast(int, module.output_size) if isinstance(module, nn.AdaptiveAvgPool2d) else 0
            if tuple(scores.shape[-2:]) == (math.prod(grid), side**2):
                return Pooled(Bins((grid[0], grid[1]), (side, side)))
        return None

    def _find_beyond(self, before: Tensor) -> str:
        """Compare the first token of the last block, from the tokens `before` it, with what its parts compute."""
        if self.stages is not None or self.windows > 1:
            return "its attention is within windows or to pooled tokens"
        self.beyond = ""
        parts = self.parts(self.depth - 1) if self.depth else Parts()
        named = (parts.norm1, parts.norm2, parts.out, parts.fc1, parts.activation, parts.fc2, parts.qkv)
        if parts.beyond or any(part is None for part in named):
            return parts.beyond
        try:
            same = alike(self.block(self.depth - 1, before)[:, :1], self.first_row(before), 1e-4)
        except Unsupported:  # a projection that is not linear
            return ""
        return "" if same else "its blocks are not attention and an MLP, each after a norm"

    def check_constants(self, calls: Sequence[BlockCall]) -> None:
        """Refuse blocks that read something of the image besides their tokens."""
        for here, blank in zip(calls, self.calls, strict=True):
            pairs = zip(tensors_in([here.rest, here.named]), tensors_in([blank.rest, blank.named]), strict=False)
            if not all(torch.equal(a, b) for a, b in pairs):
                raise Unsupported(
                    f"{self.name} cannot be opened at its blocks: they read more of the image than their tokens; "
                    f"{BY_HAND}"
                )

    def _find_reads(self, expected: Tensor, states: Sequence[Tensor]) -> bool:
        """Find which states x_0, …, x_L the forward reads behind its blocks; False if these do not give its logits.

        A state is read if the logits are computed from it. All others are blank in the final comparison.
        """
        self.states_read = tuple(range(len(states)))
        with torch.enable_grad():
            leaves = {i: tokens.detach().requires_grad_() for i, tokens in enumerate(states)}
            logits = self._behind(leaves)
            if not logits.requires_grad:
                return False
            gradients = torch.autograd.grad(logits.sum(), list(leaves.values()), allow_unused=True)
        self.states_read = tuple(i for i, gradient in enumerate(gradients) if gradient is not None)
        return self._agree(expected, self._behind({i: states[i] for i in self.states_read}))

    def _agree(self, expected: Tensor, logits: Tensor) -> bool:
        """Whether outputs are equal up to rounding; those of a task may differ little from their mean, as depths."""
        mean = expected.mean() if self.task else 0.0
        return alike(expected - mean, logits - mean)

    def _compare(self, expected: Tensor, last: Tensor, states: Sequence[Tensor], image: Tensor) -> None:
        """Find the states that the forward reads behind its blocks; refuse one that reads more, and say what."""
        end, failed, logits = states[-1], None, expected
        try:
            logits = self._behind(last)
            if self._agree(expected, logits):
                return
        except Exception as error:
            failed = error
        if alike(end, last):
            with contextlib.suppress(Exception):  # reported below
                if self._find_reads(expected, states):
                    return
        self.states_read = ()
        if failed is not None:
            raise PatchlightError(
                f"what {self.name} runs after its backbone cannot be run separately: {first_line(failed)}; {BY_HAND}"
            ) from failed
        if not alike(end, last):
            why, worst = "its forward, or a hook, does more than call the blocks in sequence", (end, last)
        elif alike(expected, self._behind(dict(enumerate(states)), image)):
            why, worst = "its head also reads the image", (expected, logits)
        else:
            why, worst = "its head reads more than the tokens of its blocks", (expected, logits)
        what = "tokens" if worst[0] is end else "logits"
        raise PatchlightError(
            f"{self.name} gives other {what} than its backbone and head put together (they differ by "
            f"{distance(*worst):.2g}, the largest is {float(worst[0].abs().max()):.2g}): {why}; {BY_HAND}"
        )

    def _check_batches(self, outputs: Sequence[Tensor], last: Tensor) -> None:
        """Check that one blank image works for a batch of any size, unless the forward reads the batch size."""
        crossed: list[tuple[Callable[[Any], Tensor], Mapping[int, Tensor]]] = [(self.classified, self.states(last))]
        for index in sorted(self.breaks):
            crossed.append((partial(self._merge_state, index), {index: outputs[index - 1]}))
        allowed = 0.1 if quantised_layer(self.net) else 1e-3  # dynamic quantisation rounds by what is in the batch
        for self._one_blank in (True, False):
            with contextlib.suppress(Exception):
                for part, states in crossed:
                    some = {i: torch.cat([x, x.flip(2), x.roll(1, 2)]) for i, x in states.items()}
                    each = [part({i: x[row : row + 1] for i, x in some.items()}) for row in range(3)]
                    if not alike(part(some), torch.cat(each), allowed):
                        break
                else:
                    return
        raise PatchlightError(
            f"{self.name} gives different logits for an image alone and in a batch, which is not supported; {BY_HAND}"
        )

    def _merge_state(self, index: int, states: Mapping[int, Tensor]) -> Tensor:
        return self.merge(index, states[index])

    def why_not_drop(self, tokens: Tensor) -> str | None:
        """Why tokens cannot be dropped: dropping must equal hiding their keys, and the head must take any number."""
        if self.stages is not None:
            return "each of its stages merges patches of a complete grid"
        if self.breaks:
            return "its forward changes the tokens between its blocks"
        keep = torch.arange(0, self.cells, 2, device=tokens.device)[None]
        reason, short = "", tokens
        for self.masked in (False, True):
            try:
                short, hidden = self.drop_and_hide(tokens, keep)
            except Exception as error:
                reason = f"its blocks need every token ({first_line(error)})"
                continue
            if alike(hidden, short, 1e-4):
                break
            reason = "removing tokens gives another result than masking them in attention"
        else:
            return reason
        states, end = self.states(short), short.shape[1] - self.suffix
        turned = {
            i: torch.cat([x[:, : self.prefix], x[:, self.prefix : end].flip(1), x[:, end:]], 1)
            for i, x in states.items()
        }
        try:
            same = alike(self.classified(states), self.classified(turned), 1e-4)
        except Exception as error:
            return f"its head takes exactly {self.tokens} tokens ({first_line(error)})"
        return None if same else "its head depends on the positions of tokens in the grid"

    def drop_and_hide(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """The kept tokens behind the last block, once with the others dropped and once with their keys hidden.

        The readout may follow on those whose others were dropped: these run last.
        """
        seen = torch.zeros(1, self.tokens, dtype=torch.bool, device=tokens.device)
        seen[0, self.places(keep)[0]] = True
        short, hidden = self.gather(tokens, keep), tokens
        for index in range(self.depth):
            with Unseen(seen):
                hidden = self.block(index, self.merge(index, hidden))
        for index in range(self.depth):
            short = self.block(index, self.merge(index, short), keep)
        return short, self.gather(hidden, keep)

    def _find_pooling(self, last: Tensor) -> str | None:
        """Find the pooling from the tokens that the logits depend on; returns why there is no gradient, or None."""
        if self.several_states:
            self.pooling = self.pooling if self._pooling_given else "gradient"
            return None
        equal = last.mean(1, keepdim=True).expand_as(last) + 0  # all tokens the same
        sizes = [self._sizes(tokens) for tokens in (last, equal)]
        if sizes[0] is None or sizes[1] is None:
            return "its head passes no gradient (a detach, inference_mode, or a step function)"
        reads, shares = sizes[0] > 1e-6 * sizes[0].max(), sizes[1] / sizes[1].sum()
        if not self._pooling_given:
            shares = shares if bool(shares.isfinite().all()) else sizes[0] / sizes[0].sum()
            self.pooling = "map" if self.pools and self._pools(last) else self._pooling(reads, shares)
        return None

    def _pools(self, last: Tensor) -> bool:
        """Whether the logits are read through one attention behind the blocks."""
        tap = AttentionTap()
        try:
            with torch.enable_grad(), tap:
                logits = self.classified(last.detach().requires_grad_()).sum()
        except Unsupported:
            self.can_attend = "its classifier reads the tokens through more than one attention"
            return False
        if tap.matrix is None:
            return False
        (gradient,) = torch.autograd.grad(logits, tap.matrix, allow_unused=True)
        return gradient is not None and bool(gradient.any())

    def _sizes(self, tokens: Tensor) -> Tensor | None:
        """Size of the gradient of the features (or logits) at each token [N]; None if there is no gradient.

        The weights of a classifier may all be 0 before it is trained.
        """
        with torch.enable_grad():
            leaf = tokens.detach().requires_grad_()
            logits = self.features(leaf) if self.head_paths else self.classified(leaf)
            if not logits.requires_grad:
                return None
            weights = torch.randn(3, logits.shape[1], generator=torch.Generator().manual_seed(0)).to(logits)
            options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            gradients = torch.stack([torch.autograd.grad(logits, leaf, w[None], **options)[0][0] for w in weights])
        return gradients.float().norm(dim=2).sum(0) if bool(gradients.any()) else None

    def _pooling(self, reads: Tensor, shares: Tensor) -> Pooling:
        """The pooling, from which tokens are read [N] and their gradient shares [N] where all tokens are equal.

        A mean over all tokens counts as one over patches, and unequal weights as equal ones, because `pool_row` has no
        other forms.
        """
        prefix = self.prefix if self.stages is None else self.stages.tokens[-1] - math.prod(self.stages.grids[-1])
        first, patches = prefix > 0 and bool(reads[0]), bool(reads[prefix:].any())
        if first and not patches:
            return "cls+dist" if prefix > 1 and bool(reads[1]) else "cls"
        return "cls+avg" if first and float(shares[0]) > 2 * float(shares[prefix:].mean()) else "avg"


@dataclass
class _Trail:
    """The states that the readout reads of the current run of this thread: those that entered blocks until `index`."""

    model: nn.Module
    index: int = 0
    states: dict[int, Tensor] = field(default_factory=dict)


_LOCAL = threading.local()
"""The trail of this thread."""


class ScoreTap(AttentionTap):
    """Keep the scores of attention before their softmax."""

    scores: Tensor | None = None

    def attend(self, scores: Tensor) -> Tensor:
        self.scores = scores
        return super().attend(scores)

"""Vision-language models: parts, removal and answers, on tiny random models of each kind."""

from __future__ import annotations

import json
import warnings
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.prompts import Prompts
from patchlight.anatomy.vlm import BUNDLED
from patchlight.anatomy.vlm_calls import pixels_of
from patchlight.core.errors import AssumedPreprocess, DegenerateMap, PatchlightError, Unsupported
from patchlight.testing import check_method, contract_names
from tests.vlm_models import IMAGE, NAMES, TILED, build

transformers = pytest.importorskip("transformers")
PROMPT, ANSWER, LONG = [1, 7, IMAGE, 8, 9], [11, 12, 13], list(range(11, 60))


def size_of(name: str) -> tuple[int, int]:
    sizes = {"llava_next": (64, 128), "llava_onevision": (128, 128), "idefics3_tiled": (128, 64)}
    return (
        (112, 84) if name.startswith("qwen") else (64, 128) if name == "internvl_tiled" else sizes.get(name, (64, 64))
    )


_OPENED: dict[Any, Any] = {}


def opened(name: str, place: str = "tower") -> Any:
    if (name, place) not in _OPENED:
        model = _OPENED[name, "tower"].model if (name, "tower") in _OPENED else build(name)
        _OPENED[name, place] = pl.wrap(model, preprocess=pl.Preprocess(size_of(name)), place=place)
    return _OPENED[name, place]


def image_of(name: str, count: int = 1) -> Tensor:
    return torch.randn(count, 3, *size_of(name), generator=torch.Generator().manual_seed(1))


def asked(name: str, place: str = "tower", **more: Any) -> Any:
    more = {"answer": ANSWER, "words": ["token11", "token13"], "force": True, **more}
    return opened(name, place).ask(pl.heads.Answer(PROMPT, **more)).prepared(image_of(name))


def close(a: Tensor, b: Tensor, limit: float = 2e-6) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= limit * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("place", ["tower", "language"])
@pytest.mark.parametrize("name", [*NAMES, *TILED])
@torch.no_grad()
def test_parts_are_the_plain_model(name: str, place: str) -> None:
    vit, image = asked(name, place), image_of(name)
    with vit.steady():
        close(vit.readout(vit.run(vit.embed(image))), vit.model_output(image))
    each = {"llava": 16, "paligemma": 16, "qwen2_5_vl": 12, "qwen3_vl": 12, "llava_next": 16, "llava_onevision": 16}
    assert vit.views == {"llava_onevision": 5}.get(name, 3 if name in TILED else 1)
    assert vit.visual == vit.views * each.get(name, 4)
    assert vit.merge_size == (1 if each.get(name) == 16 else 2)
    lines = {"llava_next": 4, "llava_onevision": 8}  # tokens at the ends of lines
    assert vit.image_tokens == vit.visual + lines.get(name, 0)


@pytest.mark.parametrize("name", [*NAMES, *TILED])
def test_the_gradient_at_pixels_is_that_of_the_plain_model(name: str) -> None:
    vit, image = asked(name), image_of(name)
    gradients = []
    for run in (lambda x: vit.readout(vit.run(vit.embed(x))), vit.model_output):
        leaf = image.clone().requires_grad_()
        with vit.steady():
            gradients.append(torch.autograd.grad(run(leaf)[:, 1].sum(), leaf)[0])
    close(*gradients, limit=1e-5)


@pytest.mark.parametrize("name", [*NAMES, *TILED])
@torch.no_grad()
def test_removed_visual_tokens_are_hidden_keys(name: str) -> None:
    """Positions, rotary tables and masks are gathered; the sequence without tokens equals one that hides their keys."""
    vit, image = asked(name, "language"), image_of(name)
    keep = torch.tensor([[0, 2, vit.cells - 1]])
    with vit.steady():
        kept, hidden = vit.drop_and_hide(vit.embed(image), keep)
        close(kept, hidden)
        assert not torch.allclose(kept, vit.gather(vit.run(vit.embed(image)), keep), atol=1e-3)


@pytest.mark.parametrize("name", ["llava", "paligemma"])
@torch.no_grad()
def test_removed_patches_are_hidden_keys_of_the_tower(name: str) -> None:
    vit, image, keep = asked(name), image_of(name), torch.tensor([[0, 5, 6, 15]])
    with vit.steady():
        close(*vit.drop_and_hide(vit.embed(image), keep))
        last = vit.run(vit.embed(image), keep=keep)
        full = vit.run(vit.embed(image)).clone()
        full[:, vit.fine.places(keep)[0]] = last  # what its projector does to other patches does not matter
        close(vit.readout(last, keep), vit._read(vit.answer_logs(vit.visual_tokens(tokens=full), keep), 1))


MERGING = ["gemma3", "idefics3", "smolvlm", "internvl", "qwen2_5_vl", "qwen3_vl"]


@pytest.mark.parametrize("name", MERGING)
@torch.no_grad()
def test_a_square_of_patches_is_one_visual_token(name: str) -> None:
    vit, image = asked(name), image_of(name)
    members = vit.fine.members("merge")
    keep, tokens = members[[0, 3]].flatten()[None], vit.embed(image)
    with vit.steady():
        last = vit.run(tokens)
        groups = torch.tensor([[0, 3]])
        states = vit.states(last)
        shown = {index: vit.gather(state, keep) for index, state in states.items()}
        close(vit.readout(shown, keep), vit._read(vit.answer_logs(vit.visual_tokens(tokens=states), groups), 1))
        short = {index: vit.gather(state, keep[:, 1:]) for index, state in states.items()}
        with pytest.raises(Unsupported, match="pools 2 x 2 patches into one visual token, so a single patch"):
            vit.readout(short, keep[:, 1:])
    with pytest.raises(Unsupported, match="unit='merge' works"):
        pl.explain(vit, image, "rise", unit="token", samples=4)
    att = pl.explain(vit, image, "rise", unit="merge", level="token", samples=16, target=0)
    cells = att.scores.flatten()[members]
    assert torch.equal(cells.amax(1), cells.amin(1))


def cells_of_tokens(name: str, merge: int) -> list[list[int]]:
    """The visual tokens (or, with merge=1, patches) of each part of the overview, written out."""
    side, (rows, columns) = 4 // merge, (length // 64 for length in size_of(name))
    grid = [[list[int]() for _ in range(side)] for _ in range(side)]
    views = rows * columns
    for y in range(side * rows):
        for x in range(side * columns):
            tile, inside = y // side * columns + x // side, y % side * side + x % side
            first = 1 if name.startswith("llava") else 0  # these have the overview first
            grid[y // rows][x // columns].append((tile + first) * side**2 + inside)
    for y, row in enumerate(grid):
        for x, tokens in enumerate(row):
            tokens.append((0 if name.startswith("llava") else views) * side**2 + y * side + x)
    return [sorted(tokens) for row in grid for tokens in row]


def in_lines(name: str) -> list[int]:
    """The place in the prompt of each visual token in the order of views: LLaVA writes its tiles as lines."""
    rows, columns = (length // 64 for length in size_of(name))
    if not name.startswith("llava"):
        return list(range(4 * (rows * columns + 1)))
    tiles = [(tile, y, x) for tile in range(rows * columns) for y in range(4) for x in range(4)]
    lines = [(4 * (tile // columns) + y) * (4 * columns + 1) + 4 * (tile % columns) + x for tile, y, x in tiles]
    return [*range(16), *(16 + line for line in lines)]


@pytest.mark.parametrize("name", TILED)
@torch.no_grad()
def test_a_cell_of_a_tiled_image_owns_tokens_in_two_views(name: str) -> None:
    """A change of one part of the image moves its patches in a tile and in the overview, and no others."""
    vit, image, (rows, columns) = opened(name), image_of(name), (length // 64 for length in size_of(name))
    expected, prefix = cells_of_tokens(name, 1), vit.layout.prefix
    assert vit.layout.count - prefix == 16 * vit.views
    for cell in (0, 5, 14):
        y, x = divmod(cell, 4)
        changed = image.clone()
        changed[:, :, 16 * rows * y : 16 * rows * (y + 1), 16 * columns * x : 16 * columns * (x + 1)] += 1
        moved = (vit.embed(image) != vit.embed(changed)).any(2)[0].nonzero().flatten() - prefix
        assert moved.tolist() == expected[cell]
        assert vit.layout.places(torch.tensor([[cell]]))[0, prefix:].tolist() == (moved + prefix).tolist()


@pytest.mark.parametrize("name", TILED)
def test_views_are_those_of_the_processor(name: str) -> None:
    """Tiles are exactly those of transformers; an overview there is resampled by another filter."""
    tr, kind, size = transformers, name.removesuffix("_tiled"), size_of(name)
    side, same = {"height": 64, "width": 64}, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pinpoints = {"image_grid_pinpoints": [[64, 128], [128, 128]]}
    cuts = {
        "llava_next": (tr.LlavaNextImageProcessor, {"size": {"shortest_edge": 64}, "crop_size": side, **pinpoints}),
        "llava_onevision": (tr.LlavaOnevisionImageProcessor, {"size": side, **pinpoints}),
        "idefics3": (
            tr.Idefics3ImageProcessor,
            {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
        ),
        "internvl": (tr.GotOcr2ImageProcessor, {"size": side, "crop_to_patches": True}),
    }
    cut, settings = cuts[kind]
    pixels = torch.randint(0, 256, (*size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    theirs = cut(**settings, **same)(images=Image.fromarray(pixels.numpy()), return_tensors="pt")["pixel_values"]
    ours = pixels_of(opened(name).config, (pixels.permute(2, 0, 1)[None].float() / 255 - 0.5) / 0.5)["pixel_values"]
    tiles = slice(1, None) if kind.startswith("llava") else slice(None, -1)
    assert ours.shape == theirs.shape
    close(ours.view(-1, 3, 64, 64)[tiles], theirs.view(-1, 3, 64, 64)[tiles])


@pytest.mark.parametrize("name", TILED)
@torch.no_grad()
def test_removing_a_cell_removes_its_tokens_of_all_views(name: str) -> None:
    """The same as the plain language model without these tokens; without one view of them it is not the same."""
    vit, image, prompt = asked(name, "language"), image_of(name), asked(name).transcript.prompt
    merge, kept = vit.merge_size, [0, vit.cells - 1]
    first, line = 2, in_lines(name)
    places = [[first + line[token] for token in tokens] for tokens in cells_of_tokens(name, merge)]
    assert vit.layout.per_cell == vit.views
    ids = torch.cat([prompt, torch.tensor(ANSWER)])
    visual = {place for cell in places for place in cell}
    ends = [i for i in range(len(ids)) if ids[i] == IMAGE and i not in visual]  # of lines: these stay
    assert len(ends) == vit.image_tokens - vit.visual
    entered = list[Tensor]()
    net: Any = vit.net
    language = net.get_submodule(vit.language_path)
    with language.register_forward_pre_hook(
        lambda module, args, named: entered.append(named["inputs_embeds"]), with_kwargs=True
    ):
        plain = vit.call(image, ids, len(ANSWER)).logits[:, -4:-1]

    def without(gone: list[int], **more: Any) -> Tensor:
        keep = torch.tensor([i for i in range(len(ids)) if i not in gone])
        more = {"position_ids": keep[None], "attention_mask": torch.ones(1, len(keep)), **more}
        out = language(inputs_embeds=entered[0][:, keep], use_cache=False, **more).last_hidden_state
        return net.lm_head(out)[:, -4:-1].log_softmax(-1).gather(2, torch.tensor(ANSWER)[None, :, None])[..., 0]

    close(without([]), plain.log_softmax(-1).gather(2, torch.tensor(ANSWER)[None, :, None])[..., 0])
    gone = [place for cell in range(vit.cells) if cell not in kept for place in places[cell]]
    logs = vit.answer_logs(vit.visual_tokens(image), torch.tensor([kept]))[0]
    close(logs, without(gone))
    overview = range(first, first + 16) if name.startswith("llava") else range(first + 4 * (vit.views - 1), 99)
    for wrong in ([i for i in gone if i in overview], [i for i in gone if i not in overview], [*gone, *ends]):
        if wrong != gone:
            assert float((logs - without(wrong)).abs().max()) > 1e-3
    renumbered = torch.arange(len(ids) - len(gone))[None]
    assert float((logs - without(gone, position_ids=renumbered)).abs().max()) > 1e-3


@pytest.mark.parametrize("place", ["tower", "language"])
@pytest.mark.parametrize("name", TILED)
def test_a_map_of_a_tiled_image_sums_over_both_views(name: str, place: str) -> None:
    """Input times gradient of all tokens of a cell; those of one view alone are another map."""
    vit, image = asked(name, place), image_of(name)
    with vit.steady():
        leaf = vit.embed(image).detach().requires_grad_()
        score = vit.readout(vit.run(leaf))[0, 0]
        products = (leaf * torch.autograd.grad(score, leaf)[0]).sum(2)[0, vit.layout.prefix :].detach()
    merge = vit.merge_size if place == "language" else 1
    if place == "tower":
        cells = cells_of_tokens(name, 1)
    else:  # without the ends of lines, which are text
        line = in_lines(name)
        rank = {at: number for number, at in enumerate(sorted(line))}
        cells = [[rank[line[token]] for token in tokens] for tokens in cells_of_tokens(name, merge)]
    expected = torch.stack([products[cell].sum() for cell in cells])
    att = pl.explain(vit, image, "ixg", target=0)
    close(att.scores.flatten(), expected, limit=1e-5)
    overview = products[: len(cells)] if name.startswith("llava") else products[-len(cells) :]
    assert float((overview - expected).abs().max()) > 1e-2 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["llava_next", "internvl_tiled"])
def test_pixels_are_painted_in_both_views(name: str) -> None:
    vit, image = opened(name), image_of(name)
    head = pl.heads.Answer(PROMPT, ANSWER, words="all", force=True)
    att = pl.explain(vit, image, "occlusion", head=head, unit="patch", level="token", fill="zero", score="logit")
    (rows, columns), full = (length // 64 for length in size_of(name)), vit.ask(head).prepared(image)
    for cell in (0, 6):
        painted, (y, x) = image.clone(), divmod(cell, 4)
        painted[:, :, 16 * rows * y : 16 * rows * (y + 1), 16 * columns * x : 16 * columns * (x + 1)] = 0
        with torch.no_grad(), full.steady():
            drop = full.model_output(image)[0, 0] - full.model_output(painted)[0, 0]
        close(att.scores.flatten()[cell], drop, limit=1e-5)
    with pytest.raises(
        Unsupported, match=r"each part of an image in 3 patches of 3 views; unit='patch' paints them all"
    ):
        pl.explain(vit, image, "tis", head=head)


def test_attention_of_a_tower_is_within_views() -> None:
    """Its rows are those of the tower of transformers on the views, one after the other."""
    model, image = build("llava_next"), image_of("llava_next")
    model.set_attn_implementation("eager")
    pixels = pixels_of(opened("llava_next").config, image)["pixel_values"][0]
    with torch.no_grad():
        maps = model.model.vision_tower(pixels, output_attentions=True).attentions
    head = pl.heads.Answer(PROMPT, ANSWER, words="all", force=True)
    vit = opened("llava_next").ask(head).prepared(image)
    with pl.trace(vit, image, target=0) as passed:
        rows = passed.attention
    for layer, seen in enumerate(rows):
        expected = torch.zeros(51, 51)
        for view in range(3):
            at = torch.tensor([view, *range(3 + 16 * view, 19 + 16 * view)])
            expected[at[:, None], at] = maps[layer][view].mean(0)
        close(seen[0].mean(0), expected)


def test_sizes_of_tiled_images() -> None:
    model = build("llava_next")
    with pytest.warns(AssumedPreprocess, match="are assumed to be resized to 64 x 128 pixels"):
        assumed = pl.wrap(model).preprocess
    assert (assumed.size, assumed.fit) == ((64, 128), "squash")  # nothing of a photograph is cut off
    with pytest.raises(PatchlightError, match=r"it cuts images of the sizes \[\[64, 128\], \[128, 64\]\] into tiles"):
        pl.wrap(model, preprocess=pl.Preprocess((64, 64)))
    with pytest.raises(PatchlightError, match=r"448 x 448 pixels: this is an image in too many tiles .49, at most 36"):
        pl.wrap(build("internvl"), preprocess=pl.Preprocess((448, 448)))
    onevision = build("llava_onevision")
    onevision.config.image_grid_pinpoints = [[256, 256]]  # more than 9 tiles: the model resizes their tokens
    with pytest.raises(Unsupported, match=r"makes .* visual tokens of 4 x 4 patches, which is not one of each square"):
        pl.wrap(onevision, preprocess=pl.Preprocess((256, 256)))


@torch.no_grad()
def test_qwen_removes_squares_exactly_inside_its_windows() -> None:
    """Windows become shorter: the same as the tower on a list of tokens with the others' keys hidden."""
    vit, image = asked("qwen2_5_vl"), image_of("qwen2_5_vl")
    keep = vit.fine.members("merge")[[0, 1, 4, 9]].flatten()[None]
    with vit.steady():
        tokens = vit.embed(image)
        short = vit.run(tokens, keep=keep)
        places, hidden = vit.fine.places(keep)[0], tokens
        for index in range(vit.depth):
            hidden = _hide_keys(vit, index, hidden, places)
        close(short, hidden[:, places])
        mixed = tokens
        for index in range(vit.depth):
            mixed = _hide_keys(vit, index, mixed, places, windows=False)
        assert float((short - mixed[:, places]).abs().max()) > 1e-2  # kept tokens as one window are another tower
        reading = tokens
        for index in range(vit.depth):
            reading = _hide_keys(vit, index, reading, keep[0])
        assert float((short - reading[:, keep[0]]).abs().max()) > 1e-2  # in reading order these are other patches
        both = torch.cat([keep, keep.flip(1)])
        two = vit.run(tokens.expand(2, -1, -1), keep=both)
        close(two[0], short[0])
        close(two[1].flip(0), short[0])


def _hide_keys(vit: Any, index: int, tokens: Tensor, seen: Tensor, windows: bool = True) -> Tensor:
    """A block of the tower by its own formula, where each token attends to the seen tokens of its window."""
    block, call = vit.blocks[index], vit.calls[index]
    x, (cos, sin) = tokens[0], call.named["position_embeddings"]
    n = block.norm1(x)
    q, k, v = block.attn.qkv(n).view(len(n), 3, 4, 8).unbind(1)

    def turned(t: Tensor) -> Tensor:
        half = torch.cat([-t[..., 4:], t[..., :4]], -1)
        return t * cos[:, None] + half * sin[:, None]

    window = torch.searchsorted(call.named["cu_seqlens"][1:].contiguous(), torch.arange(len(n)), right=True) * windows
    allowed = (window[:, None] == window) & torch.zeros(len(n), dtype=torch.bool).index_fill(0, seen, True)
    scores = torch.einsum("ihd,jhd->hij", turned(q), turned(k)) / 8**0.5
    mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -1e30).softmax(-1), v)
    x = x + block.attn.proj(mixed.flatten(1))
    return (x + block.mlp(block.norm2(x)))[None]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_qwen_patches_stand_in_squares_and_windows(name: str) -> None:
    """A change of one patch moves the token that `order` says, which is not the one in reading order."""
    vit, image = opened(name), image_of(name)
    assert vit.layout.order is not None
    for cell in (0, 8, 21, 47):
        row, column = divmod(cell, 6)
        changed = image.clone()
        changed[:, :, 14 * row : 14 * row + 14, 14 * column : 14 * column + 14] += 1
        moved = (vit.embed(image) != vit.embed(changed)).any(2)[0].nonzero().flatten().tolist()
        assert moved == [vit.layout.order[cell]]


@pytest.mark.parametrize(("name", "place"), [("llava", "language"), *((name, "tower") for name in NAMES)])
def test_bfloat16_weights_open_and_stay_in_the_language_model(name: str, place: str) -> None:
    vit = pl.wrap(build(name).bfloat16(), preprocess=pl.Preprocess(size_of(name)), place=place)
    head, image = pl.heads.Answer(PROMPT, ANSWER, words="all", force=True), image_of(name)
    att = pl.explain(vit, image, "ixg", head=head)
    full = pl.explain(opened(name, place), image, "ixg", head=head)
    assert torch.corrcoef(torch.stack([att.scores.flatten(), full.scores.flatten()]))[0, 1] > 0.95
    wide = vit.wide()
    assert wide.net.lm_head.weight.dtype == torch.bfloat16
    assert wide.dtype == (torch.bfloat16 if place == "language" or name == "smolvlm" else torch.float32)


@torch.no_grad()
def test_llava_does_not_read_its_last_block() -> None:
    vit, image = opened("llava"), image_of("llava")
    assert vit.depth == 3
    assert "reads block 2 last" in vit.note
    model = build("llava")
    nn.init.constant_(model.model.vision_tower.encoder.layers[3].mlp.fc2.bias, torch.nan)
    ids = torch.tensor([[1, *[IMAGE] * 16, 8, 9]])
    assert torch.equal(
        model(input_ids=ids, pixel_values=image).logits, vit.model(input_ids=ids, pixel_values=image).logits
    )


@torch.no_grad()
def test_states_that_the_visual_tokens_are_made_of() -> None:
    """Qwen3-VL reads four states; what it adds behind blocks 0, 1, 2 of the language model comes from three of them."""
    assert {name: opened(name).reads for name in NAMES} == {
        **dict.fromkeys(NAMES, (4,)),
        "llava": (3,),
        "qwen3_vl": (1, 2, 3, 4),
    }
    vit, image = asked("qwen3_vl"), image_of("qwen3_vl")
    assert vit.added == 3
    with vit.steady():
        states = vit.states(vit.run(vit.embed(image)))
        visual = vit.visual_tokens(image)
        assert visual.shape == (1, 12, 4 * 32)
        close(vit.visual_tokens(tokens=states), visual)
        for part, state in enumerate((4, 1, 2, 3)):
            changed = vit.visual_tokens(tokens={**states, state: states[state].roll(1, 2)})
            moved = [bool((a != b).any()) for a, b in zip(changed.split(32, 2), visual.split(32, 2), strict=True)]
            assert moved == [part == i for i in range(4)]
        without = torch.cat([visual[..., :32], torch.zeros(1, 12, 96)], 2)
        assert float((vit.answer_logs(without)[0] - vit.answer_logs(visual)[0]).abs().max()) > 1e-2


@torch.no_grad()
def test_without_an_image_the_language_model_reads_text_at_its_positions() -> None:
    vit = asked("llava")
    none = torch.zeros(1, 0, dtype=torch.long)
    logs = vit.answer_logs(vit.visual_tokens(image_of("llava")), none)[0]
    net: Any = vit.net.model.language_model
    places = torch.tensor([[0, 1, 18, 19, 20, 21, 22]])
    text = net.embed_tokens(torch.tensor([[1, 7, 8, 9, *ANSWER]]))

    def read(**more: Any) -> Tensor:
        out = vit.net.lm_head(net(inputs_embeds=text, use_cache=False, **more).last_hidden_state)[:, 3:6]
        return out.log_softmax(-1).gather(2, torch.tensor(ANSWER)[None, :, None])[..., 0]

    close(logs, read(position_ids=places, attention_mask=torch.ones(1, 7)))
    assert float((logs - read(position_ids=places)).abs().max()) > 1e-3  # gaps are taken for packed sequences
    assert float((logs - read(attention_mask=torch.ones(1, 7))).abs().max()) > 1e-3  # positions are renumbered


@torch.no_grad()
def test_masks_of_gemma3_are_gathered_not_rebuilt() -> None:
    """The masks of the short sequence are parts of the full ones; the model's own for that sequence are others."""
    vit, image = asked("gemma3", "language"), image_of("gemma3")
    visual, ids = vit.visual_tokens(image), torch.cat([vit.transcript.prompt, torch.tensor(ANSWER)])
    logs = vit.answer_logs(visual, torch.tensor([[0, 3]]))[0]
    places = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9, 10])  # without two of the four visual tokens
    with vit.steady():
        entered, calls = vit._record_calls(ids, len(ANSWER), vit.blank(1))
    tokens = entered[:, places].clone()
    tokens[:, 2:4] = visual[:, [0, 3]]
    net: Any = vit.net

    def read(mask: Any) -> Tensor:
        out = net.model.language_model(
            inputs_embeds=tokens, position_ids=places[None], attention_mask=mask, use_cache=False
        )
        out = net.lm_head(out.last_hidden_state)[:, 5:8].log_softmax(-1)
        return out.gather(2, torch.tensor(ANSWER)[None, :, None])[..., 0]

    masks = [call["attention_mask"][..., places[:, None], places] for call in calls]
    close(logs, read({"sliding_attention": masks[0], "full_attention": masks[1]}))
    assert float((logs - read(torch.ones(1, 9))).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
@torch.no_grad()
def test_a_picture_of_zeros_is_not_taken_for_padding(name: str) -> None:
    vit, zeros = opened(name), torch.zeros(1, 3, 64, 64)
    ids = torch.tensor([[1, *[IMAGE] * 4, 8]])
    close(vit.visual_tokens(zeros), vit.visual_tokens(zeros + 1e-6))
    assert vit.visual_tokens(torch.cat([zeros, image_of(name)])).shape == (2, 4, 32)
    pixels = torch.stack([zeros[0], image_of(name)[0]])[None]  # the model itself drops it: one picture is left of two
    assert len(vit.net.get_image_features(pixel_values=pixels).pooler_output) == 1
    both = torch.cat([zeros, image_of(name)])
    for row, picture in enumerate(both):
        close(vit.call(both, ids[0]).logits[row], vit.call(picture[None], ids[0]).logits[0])


@torch.no_grad()
def test_paligemma_does_not_see_later_words() -> None:
    """The answer is marked as the suffix; as a prefix, its earlier tokens would attend to the later ones."""
    image, first = image_of("paligemma"), []
    for last in (13, 55):
        vit = asked("paligemma", answer=[11, 12, last], words="all")
        first.append(vit.answer_logs(vit.visual_tokens(image))[0][:, :2])
    assert torch.equal(first[0], first[1])
    vit, outs = opened("paligemma"), []
    for last in (13, 55):
        ids = torch.tensor([[*[IMAGE] * 16, 8, 9, 11, 12, last]])
        outs.append(vit.net(input_ids=ids, pixel_values=image, token_type_ids=torch.zeros_like(ids)).logits[:, :-1])
    assert float((outs[0] - outs[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_the_text_before_the_image_are_the_same_for_all_variants(name: str) -> None:
    """Without gradients they are computed once; PaliGemma has no text before the image."""
    vit, image = asked(name), image_of(name)
    keep = torch.tensor([[0, vit.visual - 1], [1, 2]])
    with vit.steady():
        visual = vit.visual_tokens(image).expand(2, -1, -1)
        full = vit.answer_logs(visual, keep)[0]  # with gradients all tokens are run
        with torch.no_grad():
            logs = [vit.answer_logs(visual, keep)[0] for _ in range(2)]
    close(logs[0], full.detach(), limit=1e-5)
    assert torch.equal(*logs)
    assert [keys.count for _, keys in vit.transcript.keys.values()] == ([] if name == "paligemma" else [2])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_teacher_forcing_is_the_sum_of_single_steps(name: str) -> None:
    vit, image = asked(name), image_of(name)
    logs, prompt = vit.answer_logs(vit.visual_tokens(image))[0][0], vit.transcript.prompt
    for step, token in enumerate(ANSWER):
        ids = torch.cat([prompt, torch.tensor(ANSWER[:step], dtype=torch.long)])
        single = vit.call(image, ids, step).logits[0, -1].log_softmax(-1)[token]
        close(logs[step], single)
    every = asked(name, words="all").model_output(image)[0, 0]
    each = asked(name, words=["token11", "token12", "token13"]).model_output(image)[0, :3]
    close(each.sum(), every)
    close(asked(name, words="all").model_output(image)[0, 1], (every / 3).exp())


@pytest.mark.parametrize("name", ["llava", "paligemma", "gemma3", "qwen2_5_vl"])
@torch.no_grad()
def test_several_answers_are_read_in_one_sequence(name: str) -> None:
    image, choices = image_of(name), [[11, 12], [40], [41, 42, 43]]
    vit = opened(name).ask(pl.heads.Answer(PROMPT, choices=choices)).prepared(image)
    logits = vit.readout(vit.run(vit.embed(image)))[0]
    for choice, found in zip(choices, logits, strict=True):
        alone = asked(name, answer=choice, words="all").model_output(image)[0, 0]
        close(found, alone, limit=1e-5)
    against = asked(name, against=[40], words="all")
    value = against.readout(against.run(against.embed(image)))[0]
    close(value[0], asked(name, words="all").model_output(image)[0, 0] - logits[1], limit=1e-5)
    close(value[1], value[0].sigmoid())


PAIR = [1, IMAGE, 7, IMAGE, 8, 9]
"""A prompt with two images, with text between them."""


@pytest.mark.parametrize("place", ["tower", "language"])
@pytest.mark.parametrize("name", [*NAMES, "llava_next", "internvl_tiled"])
def test_one_of_two_images_is_explained_and_the_other_stays(name: str, place: str) -> None:
    """The gradient at the pixels of each is that of the plain model on both; it has the tokens of both as context."""
    pair = image_of(name, 2)
    for position in (0, 1):
        image, others = pair[[position]], pair[[1 - position]]
        head = pl.heads.Answer(PAIR, ANSWER, words="all", force=True, others=others, position=position)
        vit, leaf = opened(name, place).ask(head).prepared(image), pair.clone().requires_grad_()
        ids = torch.cat([vit.transcript.prompt, torch.tensor(ANSWER)])
        assert int((ids == IMAGE).sum()) == 2 * vit.image_tokens
        with vit.steady():
            out = vit.call(leaf[None], ids, len(ANSWER)).logits[0, -4:-1].log_softmax(-1)
            whole = out.gather(1, torch.tensor(ANSWER)[:, None]).sum()
            (expected,) = torch.autograd.grad(whole, leaf)
            single = image.clone().requires_grad_()
            score = vit.readout(vit.run(vit.embed(single)))[0, 0]
            close(score.detach(), whole.detach(), limit=1e-5)
            close(torch.autograd.grad(score, single)[0][0], expected[position], limit=1e-5)
        if place == "language":
            with torch.no_grad(), vit.steady():
                close(*vit.drop_and_hide(vit.embed(image), torch.tensor([[0, vit.cells - 1]])))


def test_swapped_images_swap_their_maps_with_their_positions() -> None:
    """The language model on both images in the other order, each at its positions, gives the same maps."""
    pair, merged = image_of("llava", 2), list[Tensor]()
    for position in (0, 1):
        more: dict[str, Any] = {"others": pair[[1 - position]], "position": position}
        head = pl.heads.Answer(PAIR, ANSWER, words="all", force=True, **more)
        merged.append(pl.explain(opened("llava", "language"), pair[[position]], "ixg", head=head).scores.flatten())
    vit = opened("llava", "language").ask(head).prepared(pair[[1]])
    ids, net = torch.cat([vit.transcript.prompt, torch.tensor(ANSWER)]), cast(Any, vit.net)
    places = (ids == IMAGE).nonzero()[:, 0].view(2, 16)
    with torch.no_grad():
        entered = net.get_input_embeddings()(ids).clone()
        for at, image in zip(places, pair, strict=True):
            entered[at] = vit.visual_tokens(image[None])[0]

    def maps(order: Tensor, positions: Tensor) -> list[Tensor]:
        leaf = entered[order].clone().requires_grad_()
        mask = torch.zeros(len(ids), len(ids)).masked_fill(positions[:, None] < positions, -1e30)
        with vit.steady():
            out = net.model.language_model(
                inputs_embeds=leaf[None], position_ids=positions[None], attention_mask=mask[None, None], use_cache=False
            )
            logs = net.lm_head(out.last_hidden_state)[0, -4:-1].log_softmax(-1)
            score = logs.gather(1, torch.tensor(ANSWER)[:, None]).sum()
            products = (leaf * torch.autograd.grad(score, leaf)[0]).sum(1)
        return [products[torch.isin(order, at)].detach() for at in places]

    swapped = torch.arange(len(ids))
    swapped[places.flatten()] = places.flip(0).flatten()
    for found, expected in zip(maps(swapped, swapped), merged, strict=True):
        close(found, expected, limit=1e-5)
    renumbered = maps(swapped, torch.arange(len(ids)))  # without their positions they are two other maps
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in zip(renumbered, merged, strict=True))


def test_prompts_with_other_images_than_given_are_refused() -> None:
    vit, image = opened("llava"), image_of("llava")

    def explain(prompt: Any, **more: Any) -> Any:
        return pl.explain(vit, image, "ixg", head=pl.heads.Answer(prompt, ANSWER, words="all", force=True, **more))

    att = explain(PAIR, others=image_of("llava", 2)[[1]])
    assert att.head["position"] == 0
    assert len(att.head["others"]) == 1
    with pytest.raises(
        PatchlightError, match=r"has 2 image tokens, but the number of images is 1 .*; give other images as others="
    ):
        explain(PAIR)
    with pytest.raises(
        PatchlightError, match=r"has 3 image tokens, but the number of images is 2 .*; give other images as others="
    ):
        explain([*PAIR, IMAGE, 7], others=image)
    with pytest.raises(PatchlightError, match="position 2 is not possible; give at most 1"):
        explain(PAIR, others=image, position=2)
    with pytest.raises(PatchlightError, match="position is 1, but there is one image; give the others as others="):
        explain(PROMPT, position=1)


@torch.no_grad()
def test_the_prior_is_the_answer_without_the_image() -> None:
    vit, image = asked("llava", against="prior"), image_of("llava")
    logs = vit.answer_logs(vit.visual_tokens(image))[0][0]
    prior = vit.answer_logs(vit.visual_tokens(image), torch.zeros(1, 0, dtype=torch.long))[0][0]
    words = vit.question.words
    assert [word.word for word in words] == ["token11", "token12", "token13"]
    close(torch.tensor([word.gain for word in words]), logs - prior)
    close(torch.tensor([word.probability for word in words]), logs.exp())
    values = vit.model_output(image)[0]
    close(values[:2], (logs - prior)[[0, 2]])
    close(values[2:], torch.ones(2), limit=1e-4)  # from 0 without the image to 1 with it


def test_a_generated_answer_is_held_and_its_visual_words_are_explained() -> None:
    vit, image = opened("llava"), image_of("llava")
    head = pl.heads.Answer(PROMPT, force=True)
    att = pl.explain(vit, image, "ixg", head=head)
    (words,) = att.words
    assert len(words) == 64 == len(att.labels)  # it never ends
    ids = torch.tensor([1, 7, *[IMAGE] * 16, 8, 9])
    assert words[0].word == f"token{int(vit.call(image, ids).logits[0, -1].argmax())}"
    one = pl.explain(vit, image, "ixg", head=head, target=att.labels[3])
    torch.testing.assert_close(one.scores, att.scores[:, 3])
    assert att.words == one.words
    value = pl.evaluate(vit, image, one, "ins-del", unit="token", steps=4).values
    assert bool(value.isfinite().all())


@pytest.mark.parametrize("place", ["tower", "language"])
@pytest.mark.parametrize("name", ["llava", "paligemma", "qwen3_vl"])
def test_token_activation_is_the_lens_minus_earlier_words(name: str, place: str) -> None:
    vit, image = opened(name, place), image_of(name)
    head = pl.heads.Answer(PROMPT, ANSWER, words=["token11", "token13"], force=True)
    prompt = vit.ask(head).prepared(image).transcript.prompt
    with torch.no_grad():
        logits = vit.call(image, torch.cat([prompt, torch.tensor(ANSWER)]), len(ANSWER)).logits[0].double()
    cells, first = (prompt == IMAGE).nonzero()[:, 0].tolist(), len(prompt)
    lens = {word: [float(logits[i, word]) for i in cells] for word in ANSWER}
    lens = {word: [value - sum(values) / len(cells) for value in values] for word, values in lens.items()}
    alpha = [max(0.0, float(logits[first + k, 13])) for k in range(2)]
    mixed = [
        sum(a * lens[word][i] for a, word in zip(alpha, (11, 12), strict=True)) / (sum(alpha) or 1)
        for i in range(len(cells))
    ]
    size = sum(m * m for m in mixed)
    beta = max(0.0, sum(a * m for a, m in zip(lens[13], mixed, strict=True)) / size) if size else 0.0
    expected = torch.tensor([lens[11], [a - beta * m for a, m in zip(lens[13], mixed, strict=True)]])
    att = pl.explain(vit, image, "token-activation", head=head, target=[["token11", "token13"]])
    squares = vit.fine.sets("merge") if place == "tower" else slice(None)
    close(att.scores[0].flatten(1), expected[:, squares].float(), limit=1e-5)
    plain = pl.explain(vit, image, "token-activation", head=head, target="token13", earlier=False)
    close(plain.scores[0].flatten(), torch.tensor(lens[13])[squares], limit=1e-5)
    with pytest.raises(Unsupported, match="not the difference between two"):
        pl.explain(vit, image, "token-activation", head=pl.heads.Answer(PROMPT, ANSWER, against=[40], force=True))


class FirstWord(pl.heads.Answer):
    """An answer of which the first word is explained by default, as one class of several."""

    def default_target(self) -> Any:
        return 0


QUICK = ("ixg", "genatt", "gradcam", "occlusion", "token-activation", "random")


@pytest.mark.parametrize("place", ["tower", "language"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "llava_next"])
@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in contract_names()]
)
def test_methods_keep_their_contract(method: str, name: str, place: str) -> None:
    head = FirstWord(PROMPT, ANSWER, words=["token11", "token13"], force=True)
    check_method(method, opened(name, place).ask(head), image_of(name, 2))


@pytest.mark.parametrize("method", ["ixg", "genatt", "tis", "token-activation"])
def test_choices_are_classes(method: str) -> None:
    head = pl.heads.Answer(PROMPT, choices=[[11, 12], [40], [41, 42, 43]])
    check_method(method, opened("llava").ask(head), image_of("llava", 2))


def test_auto_prefers_what_was_measured_to_be_better() -> None:
    head = pl.heads.Answer(PROMPT, ANSWER, words="all", force=True)
    for name, method in (("llava", "genatt"), ("qwen3_vl", "genatt"), ("qwen2_5_vl", "grad")):
        assert pl.explain(opened(name), image_of(name), "auto", head=head).method == method


def test_rows_of_attention_in_the_language_model_warn_of_sinks() -> None:
    image, head = image_of("llava"), pl.heads.Answer(PROMPT, ANSWER, words="all", force=True)
    with pytest.warns(DegenerateMap, match="language models often attend to their first tokens"):
        pl.explain(opened("llava", "language"), image, "rawatt", head=head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.explain(opened("llava", "language"), image, "genatt", head=head)
        pl.explain(opened("llava"), image, "rawatt", head=head)


@torch.no_grad()
def test_settings_of_generation_do_not_enter_the_score() -> None:
    model, image = build("llava"), image_of("llava")
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0)
    vit = pl.wrap(model, preprocess=pl.Preprocess((64, 64))).ask(pl.heads.Answer(PROMPT, force=True)).prepared(image)
    plain = opened("llava").ask(pl.heads.Answer(PROMPT, force=True)).prepared(image)
    assert vit.question.text == plain.question.text
    assert torch.equal(vit.model_output(image), plain.model_output(image))
    ids = torch.cat([plain.transcript.prompt, plain.transcript.answers[0]])[None]
    logits = vit.call(image, ids[0]).logits[:, -1]
    other = transformers.RepetitionPenaltyLogitsProcessor(9.0)(ids, logits.clone())
    assert float((other.log_softmax(-1) - logits.log_softmax(-1)).abs().max()) > 1e-2


@pytest.mark.filterwarnings("ignore::patchlight.core.errors.DegenerateMap")
@pytest.mark.parametrize("place", ["tower", "language"])
def test_attention_is_read_whatever_the_implementation(place: str) -> None:
    """transformers itself gives no attention with sdpa."""
    model, image = build("llava"), image_of("llava")
    tower = model.model.vision_tower
    assert model.config._attn_implementation == "sdpa"
    assert not tower(image, output_attentions=True).attentions
    model.set_attn_implementation("eager")
    vit = pl.wrap(model, preprocess=pl.Preprocess((64, 64)), place=place)
    head = pl.heads.Answer(PROMPT, ANSWER, words="all", force=True)
    for method in ("rawatt", "genatt"):
        maps = [pl.explain(each, image, method, head=head).scores for each in (vit, opened("llava", place))]
        close(*maps, limit=1e-5)


@torch.no_grad()
def test_metrics_run_from_the_prior_to_the_image() -> None:
    """A curve ends at 1 with the image; with all visual tokens removed it is 0."""
    vit, image = opened("llava"), image_of("llava")
    head = pl.heads.Answer(PROMPT, ANSWER, words="all", force=True)
    att = pl.explain(vit, image, "token-activation", head=head)
    asked_vit = vit.ask(head).prepared(image)
    gain = float((asked_vit.question.full - asked_vit.question.prior).sum())
    assert abs(gain) > 0.1
    found = pl.evaluate(vit, image, att, "deletion", unit="token", steps=4)
    close(found.curve[0, [0, -1]], torch.tensor([1.0, 0.0], dtype=found.curve.dtype), limit=1e-4)
    order = att.scores.flatten().argsort(descending=True, stable=True)
    low, high = (each.mean().exp() for each in (asked_vit.question.prior, asked_vit.question.full))
    with vit.steady():
        kept = asked_vit.run(asked_vit.embed(image), keep=order[None, 8:])
        p = asked_vit.readout(kept, order[None, 8:])[0, 1]
    close(found.curve[0, 2].float(), (p - low) / (high - low), limit=1e-4)
    least = _least(vit, image)
    weak = pl.explain(vit, image, "ixg", head=pl.heads.Answer(PROMPT, LONG, words=least, force=True))
    with pytest.raises(PatchlightError, match=rf"the image has almost no effect on '{least[0]}'"):
        pl.evaluate(vit, image, weak, "ins-del", unit="token", steps=4)


def test_sentences_of_refusals(tmp_path: Any) -> None:
    vit, image = opened("llava"), image_of("llava")

    def explain(prompt: Any = PROMPT, **more: Any) -> None:
        pl.explain(vit, image, "ixg", head=pl.heads.Answer(prompt, **more))

    with pytest.raises(PatchlightError, match=r"the answer \[\] has no tokens"):
        explain(answer=[])
    with pytest.raises(PatchlightError, match=r"is 3 tokens and none of them lies in words=\['cat'\]"):
        explain(answer=ANSWER, words=["cat"], force=True)
    with pytest.raises(PatchlightError, match="has no image token"):
        explain([1, 7, 8], answer=ANSWER)
    with pytest.raises(
        PatchlightError, match=r"has 20 image tokens, but the number of images is 1 .64 x 64 pixels, 16 tokens each"
    ):
        explain([1, *[IMAGE] * 20, 8], answer=ANSWER)
    with pytest.raises(PatchlightError, match="no processor or tokenizer"):
        explain("What is it?")
    with pytest.raises(PatchlightError, match="the prompt ends with the image"):
        explain([1, IMAGE], answer=ANSWER)
    least = _least(vit, image)
    with pytest.warns(DegenerateMap), pytest.raises(PatchlightError, match="the image has almost no effect"):
        explain(answer=LONG, words=least)
    with pytest.warns(DegenerateMap, match="is not what LlavaForConditionalGeneration says for this image"):
        explain(answer=ANSWER, words="all")
    config = {"model_type": "llava", "architectures": ["Qwen2VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match="supported vision-language models: LlavaForCond"):
        pl.load(f"hf:{tmp_path}")
    for token in (-1, 10**9):
        with pytest.raises(PatchlightError, match=f"token {token}, but the vocabulary of .* is 0 to"):
            pl.explain(opened(NAMES[0]), image_of(NAMES[0]), "ixg", head=pl.heads.Answer(PROMPT, answer=[token]))
    with pytest.raises(PatchlightError, match="choices are complete answers"):
        pl.heads.Answer(PROMPT, answer=ANSWER, choices=[[1], [2]])
    with pytest.raises(PatchlightError, match="choices has 1 answer"):
        pl.heads.Answer(PROMPT, choices=["red"])
    with pytest.raises(PatchlightError, match=r"choices has 2 answer.s.; give at least two, each once"):
        pl.heads.Answer(PROMPT, choices=[[40], [40]])
    with pytest.raises(PatchlightError, match="against is the explained answer itself"):
        explain(answer=ANSWER, against=ANSWER)
    with pytest.raises(PatchlightError, match="words is empty"):
        pl.heads.Answer(PROMPT, words=[])
    with pytest.raises(PatchlightError, match="place is 'end'"):
        pl.wrap(vit.model, preprocess=pl.Preprocess((64, 64)), place="end")
    with pytest.raises(PatchlightError, match="does not take an image of 60 x 64 pixels"):
        pl.wrap(vit.model, preprocess=pl.Preprocess((60, 64)))
    with pytest.raises(Unsupported, match="norms and gated MLPs of its language model have no rule yet"):
        pl.explain(opened("llava", "language"), image, "ixg.libra", head=pl.heads.Answer(PROMPT, ANSWER, force=True))
    with pytest.raises(PatchlightError, match=r"generates answers, so it needs a prompt: head=pl.heads.Answer\("):
        pl.explain(vit, image)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_without_a_processor_answers_lists_of_ids(name: str, tmp_path: Any) -> None:
    build(name).save_pretrained(tmp_path)
    vit = pl.load(f"hf:{tmp_path}", preprocess=pl.Preprocess(size_of(name)))
    att = pl.explain(vit, image_of(name), "ixg", head=pl.heads.Answer(PROMPT, ANSWER, words="all", force=True))
    whole = pl.explain(
        opened(name), image_of(name), "ixg", head=pl.heads.Answer(PROMPT, ANSWER, words="all", force=True)
    )
    close(att.scores, whole.scores, limit=1e-4)
    with pytest.raises(PatchlightError, match=r"no processor or tokenizer \(none of .* is there\), so it cannot read"):
        pl.explain(vit, image_of(name), "ixg", head=pl.heads.Answer("What is it?"))
    if name == "llava":
        with pytest.warns(AssumedPreprocess, match="has no processor, so images are assumed to be resized"):
            pl.load(f"hf:{tmp_path}")


def test_a_processor_that_cuts_tiles_is_asked_for_one_view() -> None:
    """Its prompt then has as many image tokens as the picture makes visual tokens."""

    class Processor:
        tokenizer = type("Tokenizer", (), {"convert_ids_to_tokens": lambda self, i: "<image>"})()
        chat_template = None
        image_processor = type("Images", (), {"do_image_splitting": True})()

        def __call__(self, text: str, images: Any, do_image_splitting: bool = True) -> Any:
            assert text == "<image>What?"
            return {"input_ids": [[1, *[IMAGE] * (20 if do_image_splitting else 4), 8]]}

    prompts = Prompts.of(Processor(), None, IMAGE, "it")
    assert prompts.prompt("What?", 4, (64, 64)) == [1, *[IMAGE] * 4, 8]
    Processor.image_processor = None
    with pytest.raises(
        PatchlightError, match=r"has 20 image tokens, but the number of images is 1 .64 x 64 pixels, 4 tokens each"
    ):
        prompts.prompt("What?", 4, (64, 64))


@pytest.mark.parametrize("name", ["idefics3", "internvl", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_all_visual_tokens_removed_leave_the_text_at_its_positions(name: str) -> None:
    vit, image = asked(name), image_of(name)
    logs = vit.answer_logs(vit.visual_tokens(image), torch.zeros(1, 0, dtype=torch.long))[0]
    ids = torch.cat([vit.transcript.prompt, torch.tensor(ANSWER)])
    places = (ids != IMAGE).nonzero()[:, 0]
    positions = torch.arange(len(ids))[None]
    net: Any = vit.net
    if name.startswith("qwen"):
        grid = pixels_of(vit.config, image)["image_grid_thw"]
        positions = net.model.get_rope_index(ids[None], (ids == IMAGE).long()[None], image_grid_thw=grid)[0]
    language = net.get_submodule(vit.language_path)
    text = net.get_input_embeddings()(ids[places])[None]

    def read(**more: Any) -> Tensor:
        more = {"attention_mask": torch.ones(1, len(places)), "use_cache": False, **more}
        logits = net.lm_head(language(inputs_embeds=text, **more).last_hidden_state)[:, 3:6]
        return logits.log_softmax(-1).gather(2, torch.tensor(ANSWER)[None, :, None])[..., 0]

    close(logs, read(position_ids=positions[..., places]))
    if not name.startswith("qwen"):  # renumbered; without an image, Qwen's text has these positions too
        assert float((logs - read()).abs().max()) > 1e-3


def _least(vit: Any, image: Tensor) -> list[str]:
    """A word of a long answer that the image adds almost nothing to."""
    head = pl.heads.Answer(PROMPT, LONG, words="all", force=True)
    words = vit.ask(head).prepared(image).question.words
    least = min(words, key=lambda word: abs(word.gain))
    assert abs(least.gain) < 0.1
    return [least.word]


def test_the_bundled_model_says_the_colour_and_its_map_lies_on_the_object(tmp_path: Any) -> None:
    vit, on = pl.load("pocket-vlm"), []
    for scene in json.loads((BUNDLED / "scenes/scenes.json").read_text()):
        if "color" not in scene["question"]:
            continue
        photo, colour = BUNDLED / "scenes" / scene["file"], scene["answer"].split()[-1]
        att = pl.explain(vit, photo, "grad", head=pl.heads.Answer(scene["question"]))
        words = {word.word: word for word in att.words[0]}
        shape = scene["question"].split()[-1]
        assert colour in att.labels
        assert words[colour].gain > 0.5
        assert abs(words[shape].gain) < 0.1  # it follows from the question
        row, column = att.only(colour).top_patches(1)[0, 0].tolist()
        left, top, right, bottom = scene["box"]
        on.append(left - 8 < 8 * column < right and top - 8 < 8 * row < bottom)
        hit = pl.evaluate(vit, photo, att.only(colour), "pointing-game", boxes=[[scene["box"]]])
        assert float(hit.values[0]) == 1.0
        assert [word.word for word in att.words[0] if not word.seen] == ["the", shape]
        assert torch.equal(att.only(colour).only(colour).scores, att.only(colour).scores)
        with pytest.raises(PatchlightError, match=f"there is no map for '{shape}'"):
            att.only(shape)
        with pytest.raises(PatchlightError, match=f"the image has almost no effect on '{shape}'"):
            pl.explain(vit, photo, "grad", head=pl.heads.Answer(scene["question"], words=shape))
        with pytest.raises(PatchlightError, match=r"none of them lies in words=\['cat'\]"):
            pl.explain(vit, photo, "grad", head=pl.heads.Answer(scene["question"], words=["cat"]))
    assert on
    assert all(on)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_biases_of_a_packed_tower_belong_to_its_patches(name: str) -> None:
    """What `fullgrad` adds to `ixg` is each bias times the gradient behind it, by the plain forward of the model."""
    vit, image, seen = asked(name, words="all"), image_of(name), list[tuple[Tensor, Tensor]]()
    inside = [part for block in vit.blocks for part in block.modules()]
    inside.append(vit.net.get_submodule("model.visual.merger.norm" if name == "qwen3_vl" else "lm_head"))

    def keep(module: Any, _: Any, out: Tensor) -> None:
        if out.requires_grad and getattr(module, "bias", None) is not None:
            out.retain_grad()
            seen.append((out, module.bias.detach()))

    hooks = [part.register_forward_hook(keep) for part in inside if isinstance(part, nn.Linear | nn.LayerNorm)]
    leaf = image.clone().requires_grad_()
    with vit.steady():
        vit.model_output(leaf)[:, 0].sum().backward()
    for hook in hooks:
        hook.remove()
    expected = sum(cast(Tensor, out.grad) @ bias for out, bias in seen)[vit.layout.place]
    full, plain = (pl.explain(vit, image, method, **more) for method, more in (("fullgrad", {"start": 0}), ("ixg", {})))
    close((full.scores - plain.scores).flatten(), expected, limit=1e-5)


def test_precision_is_the_type_of_the_weights() -> None:
    assert {p.dtype for p in pl.load("pocket-vlm", precision="bf16").model.parameters()} == {torch.bfloat16}
    with pytest.raises(PatchlightError, match=r"precision is 'half'; give one of auto, full, bf16, fp16"):
        pl.load("pocket-vlm", precision="half")
    with pytest.raises(PatchlightError, match="precision belong to a model's name"):
        pl.load(opened("llava").model, precision="bf16")


@torch.no_grad()
def test_a_generated_answer_has_no_image_token() -> None:
    model, image, seen = build("llava"), image_of("llava"), list[Tensor]()
    ids = torch.tensor([[1, 7, *[IMAGE] * 16, 8, 9]])
    with model.lm_head.register_forward_hook(lambda head, args, out: seen.append(args[0])):
        model(input_ids=ids, pixel_values=image)
    model.lm_head.weight[IMAGE] = 9 * seen[0][0, -1]
    assert int(model(input_ids=ids, pixel_values=image).logits[0, -1].argmax()) == IMAGE
    vit = pl.wrap(model, preprocess=pl.Preprocess((64, 64))).ask(pl.heads.Answer(PROMPT, force=True)).prepared(image)
    assert IMAGE not in vit.transcript.answers[0]
    with pytest.raises(PatchlightError, match=r"the answer \[11, 99\] contains an image token"):
        opened("llava").ask(pl.heads.Answer(PROMPT, [11, IMAGE], force=True)).prepared(image)


def test_a_tokenizer_alone_reads_a_prompt() -> None:
    vlm, head = pl.load("pocket-vlm"), pl.heads.Answer("what color is the star")
    other = pl.wrap(vlm.model, tokenizer=vlm.prompts.tokenizer, preprocess=vlm.preprocess)
    maps = [pl.explain(each, BUNDLED / "scenes/scene-4.png", "grad", head=head) for each in (vlm, other)]
    assert maps[0].words == maps[1].words
    close(maps[0].scores, maps[1].scores)
    assert str(maps[0].words[0][3]).startswith("black (probability 0.84, gain ")

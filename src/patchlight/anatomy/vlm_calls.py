"""How vision-language models of transformers are called, and what one run of their tower shows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.discovery import map_tensors, tensors_in
from patchlight.anatomy.hf import CLIP, SIGLIP, as_processed
from patchlight.anatomy.prompts import ANSWERING
from patchlight.anatomy.twin import Twin
from patchlight.core.errors import AssumedPreprocess, PatchlightError, Unsupported, first_line, warn
from patchlight.core.images import Preprocess

KNOWN: Mapping[str, Preprocess] = {
    kind: CLIP if kind.startswith(("LlavaFor", "LlavaNext", "InternVL", "Qwen2")) else SIGLIP for kind in ANSWERING
}
"""The preprocessing of the tower that each model was published with."""
_UNSIZED = (448, 448)
"""The size of images for models that take any, if no other is given."""
_ANYRES = ("llava_next", "llava_onevision")
"""Models that show each image twice: as an overview, then as tiles, of one of the sizes in their configuration."""
_TILED = (*_ANYRES, "idefics3", "smolvlm", "internvl")
"""Models whose images may be cut into tiles of the size that the tower reads."""
_MOST_TILES = 36


@dataclass(frozen=True)
class TowerFacts:
    """What running a model once shows: grid and number of its tokens, which states visual tokens are made of, …

    An image that is cut into tiles has several `views`; each patch of the overview is then a cell of the grid, and
    `order` is that of the layout. `visual` are those of its `image_tokens` that are made of patches; the others end
    lines.
    """

    grid: tuple[int, int]
    views: int
    order: tuple[int, ...] | None
    tokens: int
    image_tokens: int
    visual: Tensor
    states: tuple[int, ...]
    packed: bool
    heads: int
    trial: list[int]


def tower_facts(model: Any, paths: Sequence[str], preprocess: Preprocess, name: str) -> TowerFacts:
    """Run a copy of the model, whose tower has its blocks at `paths`, on a random image."""
    config, copies = model.config, list[nn.Module]()
    Twin(model).renew(copies.append)
    net: Any = copies[0]
    blocks = [net.get_submodule(path) for path in paths]
    like = next(p for p in net.parameters() if p.is_floating_point())
    image = torch.randn(1, 3, *preprocess.size, generator=torch.Generator().manual_seed(0)).to(like)
    entered, states = list[Tensor](), list[Tensor]()

    def cut(tokens: Tensor) -> Tensor:
        states.append(tokens.detach().requires_grad_())
        return states[-1] * 1  # what follows may change it in place

    hooks = [
        block.register_forward_hook(lambda block, args, out: map_tensors(out, cut), prepend=True) for block in blocks
    ]
    first = blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.inference_mode(False), torch.enable_grad():
        try:
            out = net.get_image_features(**pixels_of(net.config, image))
        except Exception as error:
            raise PatchlightError(
                f"{name} does not take an image of {preprocess.size[0]} x {preprocess.size[1]} pixels: "
                f"{first_line(error)}; give preprocess=pl.Preprocess((height, width))"
            ) from error
        for hook in (first, *hooks):
            hook.remove()
        if len(entered) != 1:
            raise Unsupported(
                f"{name} runs its vision tower {len(entered)} times for one image, which is not supported"
            )
        features = [each.flatten(0, -2) for each in tensors_in(getattr(out, "pooler_output", out))]
        added = tensors_in(getattr(out, "deepstack_features", None))
        total = torch.stack([each.sum() for each in (*features, *added)]).sum()
        gradients = torch.autograd.grad(total, states, allow_unused=True)
    newline = getattr(net.model, "image_newline", None)
    lines = [each.new_zeros(len(each)).bool() if newline is None else (each == newline).all(1) for each in features]
    visual = (~torch.cat(lines)).nonzero()[:, 0]
    read = tuple(number for number, gradient in enumerate(gradients, 1) if gradient is not None)
    tokens, packed = math.prod(entered[0].shape[:-1]), entered[0].ndim == 2
    views, side, patch = 1 if packed else len(entered[0]), _side(config), _number(config.vision_config.patch_size)
    grid, order = (preprocess.size[0] // patch, preprocess.size[1] // patch), None
    if views > 1:
        grid, across = (side // patch, side // patch), [length // side for length in preprocess.size]
        cells = torch.arange(math.prod(grid)).view(grid).double().kron(torch.ones(across))[None, None]
        order = tuple(views_of(config, cells, side // patch).flatten().argsort(stable=True).tolist())
    heads = getattr(config.vision_config, "num_attention_heads", None) or config.vision_config.num_heads
    token = image_token_of(config)
    trial = [i for i in range(1, 12) if i != token][:4]
    return TowerFacts(grid, views, order, tokens, sum(map(len, lines)), visual, read, packed, heads, trial)


def _number(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _side(config: Any) -> int:
    """Height and width of what the tower reads; 0 if it takes any size."""
    return _number(getattr(config.vision_config, "image_size", 0))


def views_of(config: Any, images: Tensor, side: int) -> Tensor:
    """The views [B,V,C,side,side] of images [B,C,H,W]: tiles, and an overview, whose pixels are means of pixels."""
    across = [length // side for length in images.shape[2:]]
    tiles = images.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    if math.prod(across) > _MOST_TILES:
        raise PatchlightError(f"this is an image in too many tiles ({math.prod(across)}, at most {_MOST_TILES})")
    overview = nn.functional.avg_pool2d(images, across)[:, None]
    return torch.cat([overview, tiles] if config.model_type in _ANYRES else [tiles, overview], 1)


def image_token_of(config: Any) -> int:
    token = getattr(config, "image_token_id", None)
    return int(config.image_token_index if token is None else token)


def first_module(model: nn.Module, paths: Sequence[str], name: str) -> str:
    for path in paths:
        with contextlib.suppress(AttributeError):
            model.get_submodule(path)
            return path
    raise Unsupported(f"{name} has none of {', '.join(paths)}")


def block_paths(tower: nn.Module) -> list[str]:
    """The paths of the blocks of a tower: the members of its longest list of modules."""
    lists = {path: module for path, module in tower.named_modules() if isinstance(module, nn.ModuleList)}
    path, modules = max(lists.items(), key=lambda item: len(item[1]))
    return [f"{path}.{i}" for i in range(len(modules))]


def has_plain_blocks(block: nn.Module) -> bool:
    """Whether a block of a tower has layer norms and an MLP without a gate, which backward rules cover."""
    norms = [module for key, module in block.named_modules() if "norm" in key.rpartition(".")[2]]
    gated = any(key.endswith("gate_proj") for key, _ in block.named_modules())
    return not gated and all(isinstance(norm, nn.LayerNorm) for norm in norms)


def preprocess_of(model: Any, processor: Any, name: str) -> Preprocess:
    """The preprocessing of a processor if it has a fixed size, otherwise an assumed one."""
    vision, known = model.config.vision_config, KNOWN[type(model).__name__]
    side = getattr(vision, "image_size", None)
    size = _UNSIZED if side is None else tuple(side) if isinstance(side, list | tuple) else (side, side)
    cut = model.config.model_type in _ANYRES
    if cut:  # squares first, then the smallest
        pinpoints = (tuple(each) for each in model.config.image_grid_pinpoints if max(each) > max(size))
        size = min(pinpoints, key=lambda each: (each[0] != each[1], math.prod(each)))
    images = getattr(processor, "image_processor", processor)
    if images is None:
        assumed = replace(known, size=size, fit="squash" if cut else known.fit)
        warn(
            f"{name} has no processor, so images are assumed to be resized to {size[0]} x {size[1]} pixels, mean "
            f"{list(known.mean)}, std {list(known.std)}; give processor= or preprocess=pl.Preprocess(…)",
            AssumedPreprocess,
        )
        return assumed
    try:
        if not cut:
            return as_processed(images, 3, name)
    except PatchlightError:  # it cuts pictures, or keeps their size
        pass
    mean, std = (tuple(float(v) for v in getattr(images, key)) for key in ("image_mean", "image_std"))
    return replace(SIGLIP, size=size, mean=mean, std=std)


def pixels_of(config: Any, images: Tensor) -> dict[str, Any]:
    """Images [B,C,H,W], or several for each prompt [B,P,C,H,W], as a model takes them."""
    kind, prompts = config.model_type, len(images)
    images = images.flatten(0, 1) if images.ndim == 5 else images
    if kind in _TILED:
        size, side = list(images.shape[2:]), _side(config)
        if kind in _ANYRES and size not in [list(each) for each in config.image_grid_pinpoints]:
            raise PatchlightError(f"it cuts images of the sizes {config.image_grid_pinpoints} into tiles")
        whole = kind not in _ANYRES and (size == [side, side] or any(length % side for length in size))
        views = images[:, None] if whole else views_of(config, images, side)
        if kind in _ANYRES:
            return {"pixel_values": views, "image_sizes": torch.tensor([size] * len(images), device=images.device)}
        if kind == "internvl":
            return {"pixel_values": views.flatten(0, 1)}
        empty = (views == 0).flatten(2).all(2)[..., None, None, None]  # the model takes a view of zeros for padding
        return {"pixel_values": (views + empty.to(images) * 1e-6).unflatten(0, (prompts, -1)).flatten(1, 2)}
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


def run_prompt(net: Any, images: Tensor, ids: Tensor, suffix: int) -> Any:
    """Run a model on images and the ids [S] of a prompt, the last `suffix` of which are an answer."""
    config, count = net.config, len(images)
    ids = ids.to(images.device)
    more: dict[str, Any] = {}
    visual = (ids == image_token_of(config)).long()
    if config.model_type == "paligemma":  # an answer is the suffix: unmarked, earlier tokens would attend to later ones
        marks = torch.zeros_like(ids)
        marks[len(ids) - suffix :] = 1
        more["token_type_ids"] = marks.expand(count, -1)
    elif config.model_type == "gemma3":
        more["token_type_ids"] = visual.expand(count, -1)
    elif config.model_type.startswith("qwen"):
        more["mm_token_type_ids"] = visual.expand(count, -1)
    return net(input_ids=ids.expand(count, -1), use_cache=False, **pixels_of(config, images), **more)

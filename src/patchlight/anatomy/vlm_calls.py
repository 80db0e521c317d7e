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
    kind: CLIP if kind.startswith(("Llava", "InternVL", "Qwen2")) else SIGLIP for kind in ANSWERING
}
"""The preprocessing of the tower that each model was published with."""
_UNSIZED = (448, 448)
"""The size of images for models that take any, if no other is given."""


@dataclass(frozen=True)
class TowerFacts:
    """What running a model once shows: grid and number of its tokens, which states visual tokens are made of, …"""

    grid: tuple[int, int]
    tokens: int
    visual: int
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
        features = tensors_in(getattr(out, "pooler_output", out))
        added = tensors_in(getattr(out, "deepstack_features", None))
        total = torch.stack([each.sum() for each in (*features, *added)]).sum()
        gradients = torch.autograd.grad(total, states, allow_unused=True)
    visual = sum(math.prod(each.shape[:-1]) for each in features)
    read = tuple(number for number, gradient in enumerate(gradients, 1) if gradient is not None)
    tokens, packed = entered[0].shape[-2] if entered[0].ndim == 3 else len(entered[0]), entered[0].ndim == 2
    if entered[0].ndim == 3 and len(entered[0]) > 1:
        raise Unsupported(f"{name} cuts an image into {len(entered[0])} views; give a size that it does not cut")
    patch = config.vision_config.patch_size
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    grid = preprocess.size[0] // patch, preprocess.size[1] // patch
    heads = getattr(config.vision_config, "num_attention_heads", None) or config.vision_config.num_heads
    token = image_token_of(config)
    trial = [i for i in range(1, 12) if i != token][:4]
    return TowerFacts(grid, tokens, visual, read, packed, heads, trial)


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
    images = getattr(processor, "image_processor", processor)
    if images is None:
        assumed = replace(known, size=size)
        warn(
            f"{name} has no processor, so images are assumed to be resized to {size[0]} x {size[1]} pixels, mean "
            f"{list(known.mean)}, std {list(known.std)}; give processor= or preprocess=pl.Preprocess(…)",
            AssumedPreprocess,
        )
        return assumed
    try:
        return as_processed(images, 3, name)
    except PatchlightError:  # it cuts pictures, or keeps their size
        mean, std = (tuple(float(v) for v in getattr(images, key)) for key in ("image_mean", "image_std"))
        return replace(SIGLIP, size=size, mean=mean, std=std)


def pixels_of(config: Any, images: Tensor) -> dict[str, Any]:
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

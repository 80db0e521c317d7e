"""Tiny vision-language models of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch

V = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
}
T = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
IMAGE = 99
"""The id of the image token."""
NAMES = ("llava", "paligemma", "gemma3", "idefics3", "smolvlm", "internvl", "qwen2_5_vl", "qwen3_vl")
TILED = ("llava_next", "llava_onevision", "idefics3_tiled", "internvl_tiled")
"""Models that show an image in several views: tiles and an overview."""


def config_of(name: str) -> Any:
    import transformers as tr

    name = name.removesuffix("_tiled")
    clip = tr.CLIPVisionConfig(**V)
    siglip = tr.SiglipVisionConfig(**V, vision_use_head=False)
    llama, gemma = tr.LlamaConfig(**T), tr.GemmaConfig(**T, head_dim=8)
    if name == "llava":
        return tr.LlavaConfig(vision_config=clip, text_config=llama, image_token_index=IMAGE)
    if name == "llava_next":
        cut = {"image_token_index": IMAGE, "image_grid_pinpoints": [[64, 128], [128, 64]]}
        return tr.LlavaNextConfig(vision_config=clip, text_config=llama, **cut)
    if name == "llava_onevision":
        cut = {"image_token_index": IMAGE, "image_grid_pinpoints": [[64, 128], [128, 128], [64, 64]]}
        return tr.LlavaOnevisionConfig(vision_config=siglip, text_config=tr.Qwen2Config(**T), **cut)
    if name == "paligemma":
        return tr.PaliGemmaConfig(vision_config=siglip, text_config=gemma, projection_dim=32, image_token_index=IMAGE)
    if name == "gemma3":
        text = tr.Gemma3TextConfig(
            **T, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        )
        return tr.Gemma3Config(vision_config=siglip, text_config=text, mm_tokens_per_image=4, image_token_index=IMAGE)
    if name in ("idefics3", "smolvlm"):
        kind = tr.Idefics3Config if name == "idefics3" else tr.SmolVLMConfig
        return kind(vision_config=dict(V), text_config=llama, scale_factor=2, image_token_id=IMAGE)
    if name == "internvl":
        vision = {**V, "image_size": [64, 64], "patch_size": [16, 16]}
        return tr.InternVLConfig(
            vision_config=vision, text_config=tr.Qwen2Config(**T), image_token_id=IMAGE, downsample_ratio=0.5
        )
    if name == "qwen3_vl":
        vision = {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        }
        text = {**T, "num_hidden_layers": 4, "head_dim": 8, "rope_parameters": ROTARY}
        return tr.Qwen3VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=98)
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    text = {**T, "rope_parameters": ROTARY}
    return tr.Qwen2_5_VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=98)


def build(name: str, seed: int = 0) -> Any:
    """A tiny model with random weights that are large enough to make its parts matter."""
    import transformers as tr

    torch.manual_seed(seed)
    config = config_of(name)
    model = tr.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model

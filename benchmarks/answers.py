"""Measure what explaining an answer costs, with a LLaVA of 7 billion random weights on an accelerator.

python -m benchmarks.answers --out FILE.json            # --small: a tiny model, to check the script on a CPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import patchlight as pl


def costs(small: bool) -> dict[str, Any]:
    """Times of `auto` beside a forward and a backward, and of 256 removals beside as many forwards."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlavaConfig(image_token_index=32000)
    config.text_config.vocab_size = 32064
    side = 336
    if small:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        vision = {**sizes, "image_size": 56, "patch_size": 14}
        config = LlavaConfig(
            vision_config={"model_type": "clip_vision_model", **vision},
            text_config={"model_type": "llama", **sizes, "num_key_value_heads": 4, "vocab_size": 320},
            image_token_index=300,
        )
        side = 56
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model: Any = LlavaForConditionalGeneration(config)
    torch.set_default_dtype(before)
    model.eval().requires_grad_(False)
    prompt, answer = [1, *range(5, 25), config.image_token_index, *range(30, 50)], list(range(60, 72))
    head = pl.heads.Answer(prompt, answer=answer, words="all", force=True)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "device": device}
    image = torch.randn(1, 3, side, side, device=device, dtype=next(model.parameters()).dtype)
    count = (side // 14) ** 2
    ids = torch.tensor([1, *range(5, 25), *[config.image_token_index] * count, *range(30, 50), *answer], device=device)

    def seconds(run: Callable[[], Any], times: int = 5) -> float:
        taken = []
        for _ in range(times + 1):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[1:])

    def plain() -> None:
        leaf = image.clone().requires_grad_()
        out = model(input_ids=ids[None], pixel_values=leaf, use_cache=False, logits_to_keep=len(answer) + 1)
        logs = out.logits[:, :-1].float().log_softmax(-1)
        logs.gather(2, ids[None, -len(answer) :, None]).sum().backward()

    found["forward and backward"] = seconds(plain)
    for place in ("tower", "language"):
        vit = pl.wrap(model, preprocess=pl.Preprocess((side, side)), place=place)
        asked = vit.ask(head)
        method = pl.explain(asked, image, "auto", progress=False).method
        found[f"auto at {place}"] = seconds(lambda asked=asked: pl.explain(asked, image, "auto", progress=False))
        found[f"auto at {place}, method"] = method
        keep = torch.tensor([[i for i in range(count) if i != v % count] for v in range(256)])
        from patchlight.evidence.ablation import Ablation, TokenSubsets

        ready = asked.prepared(image.cpu() if device == "cpu" else image)
        variants = TokenSubsets(torch.zeros(256, dtype=torch.long), keep)
        found[f"256 removals at {place}"] = seconds(
            lambda ready=ready, keep=variants: Ablation(ready, image, chunk=32).logits(keep), 2
        )
    batch = image.expand(32, -1, -1, -1)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(8):
            model(input_ids=ids.expand(32, -1), pixel_values=batch, use_cache=False, logits_to_keep=len(answer) + 1)

    found["256 bare forwards, 32 at once"] = seconds(bare, 2)
    base, removed = found["forward and backward"], found["256 bare forwards, 32 at once"]
    for place in ("tower", "language"):
        found[f"auto at {place}, times forward and backward"] = found[f"auto at {place}"] / base
        found[f"256 removals at {place}, times bare"] = found[f"256 removals at {place}"] / removed
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a tiny model, to check the script on a CPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = costs(options.small)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Measure what explaining an answer costs, with a LLaVA of 7 billion random weights on an accelerator.

python -m benchmarks.answers --out FILE.json            # --small: the bundled model, in CPU time on one thread
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
from torch import Tensor

import patchlight as pl
from benchmarks.common import _settle, record
from patchlight.evidence.ablation import Ablation, TokenSubsets


def _llava(device: str) -> Any:
    """A LLaVA-1.5-7B with random weights."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(image_token_index=32000)
    config.text_config.vocab_size = 32064
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = LlavaForConditionalGeneration(config)
    torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def costs(small: bool) -> dict[str, Any]:
    """Times of `auto` beside a forward and a backward, and of 256 removals beside as many forwards."""
    device = "cuda" if torch.cuda.is_available() and not small else "cpu"
    clock = time.perf_counter if device == "cuda" else time.process_time  # other processes do not count
    if small:
        torch.set_num_threads(1)
        model: Any = pl.load("pocket-vlm").model
    else:
        model = _llava(device)
    config, vision, last = model.config, model.config.vision_config, model.config.text_config.vocab_size
    side, count = vision.image_size, (vision.image_size // vision.patch_size) ** 2
    token = config.image_token_index
    words = [i for i in range(5, last) if i != token]
    prompt, answer = [1, *words[:20], token, *words[-20:]], words[2:14]
    head = pl.heads.Answer(prompt, answer=answer, words="all", force=True)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "device": device}
    image = torch.randn(1, 3, side, side, device=device, dtype=next(model.parameters()).dtype)
    ids = torch.tensor([1, *words[:20], *[token] * count, *words[-20:], *answer], device=device)

    def seconds(run: Callable[[], Any], times: int = 5, warm: Callable[[], Any] | None = None) -> float:
        (warm or run)()
        taken = []
        for _ in range(times):
            _settle()
            begin = clock()
            run()
            _settle()
            taken.append(clock() - begin)
        return statistics.median(taken)

    def plain() -> None:
        leaf = image.clone().requires_grad_()
        out = model(input_ids=ids[None], pixel_values=leaf, use_cache=False, logits_to_keep=len(answer) + 1)
        logs = out.logits[:, :-1].float().log_softmax(-1)
        logs.gather(2, ids[None, -len(answer) :, None]).sum().backward()

    batch = image.expand(32, -1, -1, -1)

    @torch.no_grad()
    def bare(calls: int = 8) -> None:
        for _ in range(calls):
            model(input_ids=ids.expand(32, -1), pixel_values=batch, use_cache=False, logits_to_keep=len(answer) + 1)

    base = found["forward and backward"] = seconds(plain)
    forwards = found["256 bare forwards, 32 at once"] = seconds(bare, 1, lambda: bare(1))
    print(json.dumps(found), flush=True)
    for place in ("tower", "language"):
        begin = clock()
        vit = pl.wrap(model, preprocess=pl.Preprocess((side, side)), place=place)
        asked = vit.ask(head)
        found[f"opening at {place}"] = clock() - begin
        method = pl.explain(asked, image, "auto", progress=False).method
        auto = seconds(lambda asked=asked: pl.explain(asked, image, "auto", progress=False))
        found[f"auto at {place} ({method})"] = auto
        found[f"auto at {place}, times forward and backward"] = auto / base
        begin = clock()
        pl.explain(asked, image + 0.1, "auto", progress=False)
        found[f"auto at {place} with the question prepared for a new image"] = clock() - begin
        print(json.dumps(found), flush=True)
        ready = asked.prepared(image)
        keep = torch.tensor([[i for i in range(count) if i != v % count] for v in range(256)])

        def remove(variants: int = 256, ready: Any = ready, keep: Tensor = keep) -> None:
            subsets = TokenSubsets(torch.zeros(variants, dtype=torch.long), keep[:variants])
            Ablation(ready, image, chunk=32).logits(subsets)

        removals = seconds(remove, 1, lambda remove=remove: remove(32))
        found[f"256 removals at {place}"] = removals
        found[f"256 removals at {place}, times bare"] = removals / forwards
        print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="the bundled model, in CPU time on one thread")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = costs(options.small)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    limits = {"forward and backward": "1.5", "bare": "1.3"}
    rows = [
        [what, f"{value:.4g}", limits.get(what.partition(", times ")[2], "")]
        for what, value in found.items()
        if isinstance(value, float)
    ]
    size = f"{found['parameters'] / 1e6:,.1f} million"
    what = "pocket-vlm, in CPU time on one thread" if options.small else f"a LLaVA of {size} random weights"
    title = f"Answers of {what}: seconds of one image, and ratios"
    command = "python -m benchmarks.answers --out FILE" + " --small" * options.small
    record("answers", title, ["what", "value", "at most"], rows, command, cpu=options.small)


if __name__ == "__main__":
    main()

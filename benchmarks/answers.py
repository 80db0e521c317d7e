"""Measure answers of vision-language models: where maps lie, deletion against random, and costs.

python -m benchmarks.answers --scenes 50 --out DIR     # the bundled model on new scenes: a table in Markdown
python -m benchmarks.answers --costs --out FILE.json    # a LLaVA of 7 billion random weights, on an accelerator
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import patchlight as pl

METHODS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tower": [
        ("random", {}),
        ("rawatt", {}),
        ("genatt", {}),
        ("grad", {}),
        ("ixg", {}),
        ("fullgrad-plus.libra", {}),
        ("gradcam", {}),
        ("occlusion", {"unit": "token", "level": "token"}),
        ("posterior", {"samples": 256}),
    ],
    "language": [
        ("rawatt", {}),
        ("genatt", {}),
        ("ixg", {}),
        ("occlusion", {"unit": "token", "level": "token"}),
        ("posterior", {"samples": 256}),
    ],
}


def scenes(count: int) -> list[tuple[Tensor, Tensor, str, str]]:
    """New scenes with a question about a colour: image [1,3,H,W], mask [H,W], question and colour."""
    from tools.train_vlm import WORDS, ask, normalise

    asked, found = ask(8 * count, torch.Generator().manual_seed(3 * 10**6)), []
    for i in (asked.there & (asked.kinds == 0)).nonzero().flatten().tolist()[:count]:
        words, begin = [WORDS[k] for k in asked.ids[i].tolist()], int(asked.begin[i])
        colour = words[words.index("</s>") - 1]
        found.append((normalise(asked.images[i : i + 1]), asked.masks[i], " ".join(words[:begin]), colour))
    return found


def table(count: int) -> str:
    """Where the maps of the colour lie, and deletion and insertion, with 95 % intervals."""
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    right = 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places: dict[str, Any] = {place: pl.load("pocket-vlm", device=device, place=place) for place in METHODS}
    known = {method.name for method in pl.list_methods()}
    chosen = scenes(count)
    for number, (image, mask, question, colour) in enumerate(chosen):
        head = pl.heads.Answer(question)
        words = places["tower"].ask(head).prepared(places["tower"].batch(image)).question
        if words.words[-1].word != colour or colour not in words.labels:
            continue
        right += 1
        near = torch.nn.functional.max_pool2d(mask[None, None].float(), 8)[0, 0] > 0
        for place, vit in places.items():
            for name, settings in METHODS[place]:
                if name.partition(".")[0] not in known:
                    continue
                att = pl.explain(vit, image, name, head=head, target=colour, progress=False, **settings)
                row = rows.setdefault((place, name), {"on": [], "deletion": [], "insertion": []})
                top = att.top_patches(1)[0, 0].tolist()
                row["on"].append(float(near[top[0], top[1]]))
                for metric in ("deletion", "insertion"):
                    value = pl.evaluate(
                        places["tower"],
                        image,
                        att.scores,
                        metric,
                        unit="token",
                        steps=16,
                        head=head,
                        target=colour,
                        progress=False,
                    )
                    row[metric].append(float(value.values[0]))
        print(number, end=" ", flush=True)
    lines = [
        f"Of {len(chosen)} new scenes with a question about a colour, {right} were answered correctly and the colour "
        "gained more than 0.5 nats from the image.",
        "",
        "| place | method | top patch on the object | deletion | insertion |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (place, name), row in rows.items():
        cells = [f"{100 * statistics.mean(row['on']):.0f} % ({_share(row['on'])})"]
        cells += [f"{statistics.mean(row[m]):.3f} ± {_half(row[m]):.3f}" for m in ("deletion", "insertion")]
        lines.append(f"| {place} | `{name}` | {' | '.join(cells)} |")
    best = rows[min(rows, key=lambda key: statistics.mean(rows[key]["deletion"]))]
    gap = [a - b for a, b in zip(rows["tower", "random"]["deletion"], best["deletion"], strict=True)]
    lines += ["", f"Random minus the best, deletion, paired: {statistics.mean(gap):.3f} ± {_half(gap):.3f}."]
    return "\n".join(lines) + "\n"


def _half(values: list[float]) -> float:
    """Half the width of the 95 % interval of a mean."""
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def _share(values: list[float]) -> str:
    """Wilson's 95 % interval of a share, in percent."""
    n, p, z = len(values), statistics.mean(values), 1.96
    centre, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * width) / (1 + z * z / n) for sign in (-1, 1))
    return f"{100 * low:.0f} to {100 * high:.0f}"


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
    parser.add_argument("--scenes", type=int, default=0)
    parser.add_argument("--costs", action="store_true")
    parser.add_argument("--small", action="store_true", help="a tiny model, to check the script on a CPU")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.costs:
        found = costs(options.small)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(found, indent=1))
    if options.scenes:
        text = table(options.scenes)
        options.out.write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()

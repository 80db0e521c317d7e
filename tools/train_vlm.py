"""Train ``pocket-vlm``, a LLaVA of about 2 million parameters that answers questions about composed scenes.

    python -m tools.train_vlm --out DIR --minutes 3

It needs torch, transformers, tokenizers and safetensors, and no data. A check on a CPU: ``--steps 3 --batch 8``.
Written to ``--out``: a folder that ``pl.load("hf:DIR")`` opens, with float16 weights, the tokenizer, ``accuracy.json``
and ``scenes/``, six scenes that were not trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from tools.scenes import LABELS, MOST, compose

SIDE, PATCH = 64, 8
COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.7, 0.15),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.9, 0.1),
    "purple": (0.6, 0.15, 0.75),
    "orange": (1.0, 0.55, 0.05),
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
}
COUNTS = ("one", "two", "three", "four")
PLACES = ("top left", "top right", "bottom left", "bottom right")
KINDS = ("color", "shape", "place", "count")
SHARES = (0.4, 0.25, 0.2, 0.15)
"""How often each kind of question is asked."""
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "what", "color", "is", "the", "shape", "where", "how", "many"]
WORDS += ["shapes", "are", "there", "a", "at", "thing", *LABELS, *COLOURS, *COUNTS, "top", "bottom", "left", "right"]
ID = {word: i for i, word in enumerate(WORDS)}
LENGTH = 16
"""Ids of question and answer, padded."""
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


@dataclass(frozen=True)
class Asked:
    """Scenes with one question each.

    Args:
        images: Images [n,3,H,W] from 0 to 1.
        masks: Where the thing that is asked about is [n,H,W]; all shapes, for counts.
        ids: Question and answer [n,LENGTH].
        begin: Where the answer begins [n].
        kinds: The kind of each question [n].
        there: Whether the scene has a question of its kind [n].
    """

    images: Tensor
    masks: Tensor
    ids: Tensor
    begin: Tensor
    kinds: Tensor
    there: Tensor


def ask(count: int, generator: torch.Generator) -> Asked:
    """Compose scenes in named colours and ask about a shape or a colour that is there once."""
    device = generator.device
    scenes = compose(count, generator, SIDE)
    labels, names = scenes.labels, list(COLOURS)
    colour = torch.randint(len(names), labels.shape, generator=generator, device=device)
    shade = torch.tensor(list(COLOURS.values()), device=device)[colour]
    shade = (shade + 0.05 * torch.randn(shade.shape, generator=generator, device=device)).clamp(0, 1)
    images = 0.5 + 0.5 * (scenes.images - 0.5)
    real = labels >= 0
    for k in range(MOST):
        images = torch.where((scenes.masks[:, k] & real[:, k, None, None])[:, None], shade[:, k, :, None, None], images)
    shares = torch.tensor(SHARES, device=device).expand(count, -1)
    kinds = torch.multinomial(shares, 1, generator=generator)[:, 0]
    once = real & ((labels[:, :, None] == labels[:, None]) & real[:, None]).sum(2).eq(1)
    alone = real & ((colour[:, :, None] == colour[:, None]) & real[:, None]).sum(2).eq(1)
    able = torch.where((kinds == 1)[:, None], alone, torch.where((kinds == 3)[:, None], real, once))
    chance = able.float() + 1e-9
    picked = torch.multinomial(chance, 1, generator=generator)[:, 0]
    rows = torch.arange(count, device=device)
    there = able[rows, picked]
    label, shown = labels[rows, picked].clamp_min(0), colour[rows, picked]
    centre = (scenes.boxes[rows, picked, :2] + scenes.boxes[rows, picked, 2:]) / 2
    place = 2 * (centre[:, 1] > SIDE / 2).long() + (centre[:, 0] > SIDE / 2).long()
    number = real.sum(1).clamp_min(1) - 1
    ids, begin = _tables(device)
    which = torch.stack([label * len(names) + shown, shown * len(LABELS) + label, label * 4 + place, number], 1)
    starts = torch.tensor(_STARTS, device=device)
    row = starts[kinds] + which[rows, kinds]
    masks = scenes.masks[rows, picked]
    every = (scenes.masks & real[..., None, None]).any(1)
    masks = torch.where((kinds == 3)[:, None, None], every, masks)
    return Asked(images, masks, ids[row], begin[row], kinds, there)


def sentences() -> list[tuple[str, str]]:
    """Every question with every answer, kind after kind."""
    pairs = [(f"what color is the {s}", f"the {s} is {c}") for s in LABELS for c in COLOURS]
    pairs += [(f"what shape is the {c} thing", f"the {c} thing is a {s}") for c in COLOURS for s in LABELS]
    pairs += [(f"where is the {s}", f"the {s} is at the {p}") for s in LABELS for p in PLACES]
    return pairs + [("how many shapes are there", f"there are {n}") for n in COUNTS]


_STARTS = (
    0,
    len(LABELS) * len(COLOURS),
    2 * len(LABELS) * len(COLOURS),
    2 * len(LABELS) * len(COLOURS) + 4 * len(LABELS),
)
_MADE: dict[Any, tuple[Tensor, Tensor]] = {}


def _tables(device: Any) -> tuple[Tensor, Tensor]:
    """Ids [m,LENGTH] of all pairs, and where their answers begin [m]."""
    if device not in _MADE:
        rows, begins = [], []
        for question, answer in sentences():
            ids = [ID[word] for word in question.split()]
            begins.append(len(ids))
            ids += [*(ID[word] for word in answer.split()), ID["</s>"]]
            rows.append(ids + [ID["<pad>"]] * (LENGTH - len(ids)))
        _MADE[device] = torch.tensor(rows, device=device), torch.tensor(begins, device=device)
    return _MADE[device]


def build(width: int = 160) -> LlavaForConditionalGeneration:
    """The model with random weights."""
    vision = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=5,
        num_attention_heads=5,
        image_size=SIDE,
        patch_size=PATCH,
        initializer_factor=2.0,
    )
    text = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=ID["<image>"],
        vision_feature_layer=-1,
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(each, device=images.device)[:, None, None] for each in (MEAN, STD))
    return (images - mean) / std


def logits_of(model: Any, asked: Asked) -> Tensor:
    """The logits [n,LENGTH,V] that predict `ids`."""
    count, device = len(asked.ids), asked.ids.device
    image = torch.full((count, (SIDE // PATCH) ** 2), ID["<image>"], device=device)
    ids = torch.cat([torch.full((count, 1), ID["<s>"], device=device), image, asked.ids], 1)
    out = model(input_ids=ids, pixel_values=normalise(asked.images), use_cache=False, logits_to_keep=LENGTH + 1)
    logits: Tensor = out.logits[:, :-1]
    return logits


def answer_mask(asked: Asked) -> Tensor:
    """Which ids [n,LENGTH] belong to answers that are there."""
    place = torch.arange(LENGTH, device=asked.ids.device)
    return (place >= asked.begin[:, None]) & (asked.ids != ID["<pad>"]) & asked.there[:, None]


@torch.no_grad()
def accuracy(model: Any, count: int, device: str) -> dict[str, float]:
    """The share of new scenes whose complete answer is the most probable, by kind of question."""
    generator, right, total = torch.Generator(device).manual_seed(10**6), torch.zeros(4), torch.zeros(4)
    for _ in range(count // 250):
        asked = ask(250, generator)
        same = (logits_of(model, asked).argmax(2) == asked.ids) | ~answer_mask(asked)
        for kind in range(4):
            some = asked.there & (asked.kinds == kind)
            right[kind] += int(same[some].all(1).sum())
            total[kind] += int(some.sum())
    return {name: float(right[i] / total[i].clamp_min(1)) for i, name in enumerate(KINDS)}


def train(model: Any, steps: int | None, minutes: float, batch: int, rate: float, device: str) -> dict[str, Any]:
    """Train for a number of steps, or for a time whose end the learning rate follows."""
    generator = torch.Generator(device).manual_seed(0)
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decays, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    average = {key: value.clone() for key, value in model.state_dict().items()}
    begin, step = time.perf_counter(), 0
    while True:
        done = step / steps if steps is not None else (time.perf_counter() - begin) / (60 * minutes)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 300) * 0.5 * (1 + math.cos(math.pi * done)) + 1e-6
        asked = ask(batch, generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = logits_of(model, asked)
        shown = answer_mask(asked)
        loss = F.cross_entropy(logits.float()[shown], asked.ids[shown])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        keep = min(0.998, (step + 1) / (step + 10))
        state = list(model.state_dict().values())
        floats = [
            (mine, theirs) for mine, theirs in zip(average.values(), state, strict=True) if mine.is_floating_point()
        ]
        torch._foreach_lerp_([mine for mine, _ in floats], [theirs for _, theirs in floats], 1 - keep)
        if step % 200 == 0:
            print(f"step {step}, {done:.0%}, loss {loss.item():.3f}", flush=True)
        step += 1
    model.load_state_dict(average)
    return {"steps": step, "batch": batch, "rate": rate, "seconds": round(time.perf_counter() - begin, 1)}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words of the questions."""
    words = Tokenizer(WordLevel(ID, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **special, additional_special_tokens=["<image>"])
    made.chat_template = "<s> <image> {{ messages[0]['content'] | replace('<image>', '') | trim }}"
    return made


def save_scenes(folder: Path, count: int = 6) -> None:
    """Scenes as pictures, with their questions, answers and the box of what is asked about."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, about = ask(64, torch.Generator().manual_seed(2 * 10**6)), list[dict[str, Any]]()
    for i in (asked.there & (asked.kinds < 3)).nonzero().flatten().tolist()[:count]:
        file = f"scene-{len(about) + 1}.png"
        Image.fromarray((asked.images[i].permute(1, 2, 0) * 255).round().byte().numpy()).save(folder / file)
        words, begin = [WORDS[k] for k in asked.ids[i].tolist()], int(asked.begin[i])
        rows, columns = (asked.masks[i].any(axis).nonzero().flatten() for axis in (1, 0))
        box = [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]
        answer = " ".join(words[begin : words.index("</s>")])
        about.append({"file": file, "question": " ".join(words[:begin]), "answer": answer, "box": box})
    (folder / "scenes.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--scenes", type=int, default=4000, help="scenes on which the accuracy is measured")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model: Any = build()
    model.to(device).train()
    how = train(model, options.steps, options.minutes, options.batch, options.rate, device)
    model.eval()
    found = accuracy(model, options.scenes, device)
    print(found, how, sum(p.numel() for p in model.parameters()), flush=True)
    model.half().cpu().save_pretrained(options.out)
    tokenizer().save_pretrained(options.out)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessor(
        size=size, do_center_crop=False, crop_size=size, image_mean=list(MEAN), image_std=list(STD), resample=3
    ).save_pretrained(options.out)
    (options.out / "accuracy.json").write_text(json.dumps({**found, **how}, indent=1) + "\n", encoding="utf-8")
    save_scenes(options.out / "scenes")


if __name__ == "__main__":
    main()

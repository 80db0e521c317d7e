"""Measure the stored model again: ``python -m tools.evaluate_pocket --data CIFAR_DIR``.

Reads ``pocket.safetensors`` as float32 and classifies all 10,000 CIFAR-10 test images once each, on the CPU, with no
test-time augmentation. ``CIFAR_DIR`` may hold any layout that ``patchlight.data.cifar.read_cifar10`` knows.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from patchlight.data.cifar import read_cifar10
from patchlight.zoo import pocket


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the bundled model's accuracy on CIFAR-10's test images.")
    parser.add_argument("--data", required=True, help="folder with CIFAR-10")
    parser.add_argument("--batch", type=int, default=250)
    args = parser.parse_args(argv)

    about = pocket.description()
    if not pocket.check_file():
        print(f"{pocket.WEIGHTS} is not the file that pocket.json describes (SHA-256 differs)", file=sys.stderr)
        return 1
    images, labels = (torch.tensor(array) for array in read_cifar10(args.data))
    mean, std = torch.tensor(about["mean"]), torch.tensor(about["std"])
    model = pocket.build()
    began = time.perf_counter()
    answers = []
    with torch.inference_mode():
        for start in range(0, len(images), args.batch):
            x = (images[start : start + args.batch].float() / 255 - mean) / std
            answers.append(model(x.permute(0, 3, 1, 2)).argmax(1))
            done = min(start + args.batch, len(images))
            print(f"\r{done} of {len(images)} images, {time.perf_counter() - began:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    right = torch.cat(answers) == labels
    for index, name in enumerate(pocket.classes()):
        print(f"{name:<12}{right[labels == index].double().mean().item():.4f}")
    print(f"{'all':<12}{right.double().mean().item():.4f}  ({int(right.sum())} of {len(right)} test images)")
    print(f"{'recorded':<12}{about['accuracy']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

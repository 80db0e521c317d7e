"""`python -m benchmarks.trees OTHER`: explaining with two checkouts of Patchlight, alternately, in one table.

Each checkout runs in its own process and waits while the other one works. OTHER is the folder of the other checkout,
for example made by `git archive COMMIT src | tar -x -C OTHER`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

METHODS = ("genatt", "decompx.skipplus", "ixg.plus.libra", "tis")
FEW = {"tis": {"samples": 64}}
WORKER = """
import json, sys, time, warnings
import torch
import patchlight as pl
import timm
warnings.simplefilter("ignore")
given = json.loads(sys.argv[1])
torch.manual_seed(0)
if given["device"] == "cpu":
    torch.set_num_threads(1)
names = {"vit": "vit_base_patch16_224", "swin": "swin_base_patch4_window7_224"}
tiny = {"vit": dict(img_size=64, embed_dim=48, depth=3, num_heads=4), "swin": dict(img_size=64, window_size=4,
        embed_dim=16, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4))}[given["model"]] if given["tiny"] else {}
begun = time.perf_counter()
vit = pl.wrap(timm.create_model(names[given["model"]], **tiny).eval().to(given["device"]))
print(json.dumps({"opened": time.perf_counter() - begun}), flush=True)
images = torch.randn(given["batch"], 3, *vit.preprocess.size, generator=torch.Generator().manual_seed(0))
images = images.to(given["device"])
def wait():
    if given["device"] == "cuda":
        torch.cuda.synchronize()
for line in sys.stdin:
    method, options = json.loads(line)
    wait()
    begun = time.perf_counter()
    if method == "logits":
        found = vit.logits(images)
    else:
        found = pl.explain(vit, images, method, target=1, progress=False, **options).scores
    wait()
    print(json.dumps({"seconds": time.perf_counter() - begun, "sum": float(found.double().abs().sum())}), flush=True)
"""


class Tree:
    """A process that explains with the checkout in `folder`."""

    def __init__(self, folder: Path, given: dict[str, object]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), os.environ.get("WHEELS", "")])}
        command = [sys.executable, "-c", WORKER, json.dumps(given)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.opened = self.read()["opened"]

    def read(self) -> dict[str, float]:
        """The next answer of the process."""
        assert self.process.stdout is not None
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def run(self, method: str) -> dict[str, float]:
        """Explain once; the seconds that it took, and the sum of the maps."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, FEW.get(method, {})]) + "\n")
        self.process.stdin.flush()
        return self.read()


def main() -> None:
    """Print and write one row per method: medians of both, and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="vit", choices=("vit", "swin"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--methods", nargs="*", default=["logits", *METHODS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given = {key: getattr(options, key) for key in ("device", "batch", "tiny", "model")}
    before, after = Tree(options.other, given), Tree(Path.cwd(), given)
    rows = [
        f"{options.model}, batch {options.batch}, {options.device}: before, after (ms), ratio (quartiles), same sum"
    ]
    rows.append(f"{'open':20s} {before.opened * 1e3:9.2f} {after.opened * 1e3:9.2f}")
    for method in options.methods:
        for _ in range(3):
            sums = [tree.run(method)["sum"] for tree in (before, after)]
        pairs = []
        for i in range(options.rounds):  # whoever is first changes
            order = (before, after) if i % 2 else (after, before)
            times = {id(tree): tree.run(method)["seconds"] for tree in order}
            pairs.append((times[id(before)], times[id(after)]))
        old, new = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        same = f"{sums[0] == sums[1]} {abs(sums[0] - sums[1]) / max(sums[0], 1e-30):.0e}"
        rows.append(f"{method:20s} {old:9.2f} {new:9.2f}  {middle:.3f} ({low:.3f} to {high:.3f})  {same}")
        print(rows[-1], flush=True)
    text = "\n".join(rows)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""`python -m tools.docs [FOLDER]`: stage, write the reference, and build the pages; warnings are errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tools.docs import families, manual, measured, pictures, reference
from tools.docs.links import broken
from tools.docs.staging import ROOT, stage


def report(words: str, since: float) -> None:
    print(f"[{time.monotonic() - since:5.0f} s] {words}", flush=True)


def main(folder: Path) -> int:
    start = time.monotonic()
    source, html = folder / "source", folder / "html"
    stage(source)
    report("drawing every method on three photographs", start)
    drawn = pictures.draw(source / "_static" / "methods")
    report("trying every method on the model families", start)
    for _ in families.write(source / "reference" / "families"):
        pass
    reference.write(source, drawn)
    manual.write(source)
    measured.write(source)
    report("Sphinx: executing the tutorials, building the pages", start)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": paths}
    words = ["-W", "--keep-going", "-q", "-j", "2", "-b", "html", str(source), str(html)]
    if subprocess.run([sys.executable, "-m", "sphinx", *words], env=environment, check=False).returncode:
        report("failed", start)
        return 1
    wrong = list(broken(html))
    report(f"{len(wrong)} broken links", start)
    for sentence in wrong:
        print(sentence)
    report(f"the documentation is in {html / 'index.html'}", start)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs").resolve()))

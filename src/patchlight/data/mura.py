"""MURA's radiographs; the class is in the path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patchlight.core.errors import PatchlightError, escape_surrogates, nearest
from patchlight.core.images import list_images
from patchlight.data.base import Data, Sources, existing_folder, read_text, register_data


@register_data("mura")
def open_mura(path: str | Path, split: str = "valid", part: str | None = None) -> Data:
    """MURA-v1.1: class 1 if the folder of the study ends with `_positive` (abnormal), 0 if with `_negative`.

    Args:
        split: "valid" or "train": the images in `valid_image_paths.csv`, or all in the folder without such a file.
        part: A body part such as XR_WRIST; by default all.
    """
    root = existing_folder(path, "MURA-v1.1")
    root = root / "MURA-v1.1" if (root / "MURA-v1.1").is_dir() else root
    list_file = root / f"{split}_image_paths.csv"
    if list_file.is_file():
        lines = [line.strip() for line in read_text(list_file).splitlines() if line.strip()]
        named = [line.partition("/")[2] if line.startswith("MURA") else line for line in lines]
        paths = {name: root / name for name in named}
    elif (root / split).is_dir():
        paths = {escape_surrogates(p.relative_to(root).as_posix()): p for p in list_images(root / split)}
    else:
        raise PatchlightError(
            f"'{root}' has neither {list_file.name} nor a folder '{split}'; give the folder MURA-v1.1"
        )
    names = list(paths)
    if part is not None:
        parts = {name.split("/")[1] for name in names if "/" in name}
        if part not in parts:
            raise PatchlightError(f"no body part '{part}' in '{root}'; {nearest(part, parts)}")
        names = [name for name in names if name.split("/")[1:2] == [part]]
    labels = ("negative", "positive")
    sources = {name: Sources([paths[name]], _study_class(name, labels)) for name in names}
    return Data.of_files(f"mura-{split}", names, sources.__getitem__, labels)


def _study_class(name: str, labels: Sequence[str]) -> int:
    ending = Path(name).parent.name.rpartition("_")[2]
    if ending not in labels:
        raise PatchlightError(f"the folder of '{name}' ends with neither _positive nor _negative, so it has no class")
    return labels.index(ending)

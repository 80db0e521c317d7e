"""Preprocessing as a user gives it: in Python, in a JSON or TOML file, or as a processor's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from patchlight.anatomy.hf import as_processed, read_processor
from patchlight.anatomy.spec import PreprocessSpec
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.extras import missing_extra
from patchlight.core.images import Preprocess
from patchlight.core.recipes import parse_as

PROCESSOR = "preprocessor_config.json"
Prepared = Preprocess | PreprocessSpec
"""A complete preprocessing, or overrides of a model's."""


def read_preprocess(source: Any) -> Prepared:
    """Read a preprocessing that a user gives.

    A `Preprocess`, an image processor of transformers, or a folder with its preprocessor_config.json is complete. A
    dictionary, or a JSON or TOML file, has some of the fields of `Preprocess`; the others stay the model's.
    """
    if isinstance(source, PreprocessSpec) and None not in (fields := source.model_dump()).values():
        return Preprocess(**fields)
    if isinstance(source, Preprocess | PreprocessSpec):
        return source
    if isinstance(source, Mapping):
        return _checked(source, "preprocess")
    if isinstance(source, str | Path):
        return _read_path(Path(source))
    if callable(source) and hasattr(source, "image_mean"):
        return as_processed(source, 3, "the model")
    raise PatchlightError(
        f"preprocess is {type(source).__name__}; give a pl.Preprocess((height, width), …), a dictionary or a JSON or "
        "TOML file of some of its fields, or the folder of an image processor"
    )


def applied(overrides: Prepared, native: Callable[[], Preprocess]) -> Preprocess:
    """A preprocessing whose missing fields are those of the model."""
    return (
        overrides if isinstance(overrides, Preprocess) else replace(native(), **overrides.model_dump(exclude_none=True))
    )


def as_spec(source: Any) -> PreprocessSpec:
    """A preprocessing in the form of a recipe."""
    read = read_preprocess(source)
    return read if isinstance(read, PreprocessSpec) else PreprocessSpec.model_validate(asdict(read))


def _read_path(path: Path) -> Prepared:
    if os.path.isdir(path):
        if not (path / PROCESSOR).is_file():
            raise PatchlightError(f"no {PROCESSOR} in '{path}'; give the folder of an image processor, or a file")
        return _from_folder(path)
    if not os.path.isfile(path):
        raise PatchlightError(f"no preprocessing at '{path}'; give a JSON or TOML file, or a processor's folder")
    if path.name == PROCESSOR:
        return _from_folder(path.parent)
    if path.suffix.lower() not in (".json", ".toml"):
        raise PatchlightError(f"'{path}' cannot be read as a preprocessing; give a .json or .toml file, or a folder")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchlightError(f"'{path}' cannot be read as a preprocessing: {error}") from error
    if path.suffix.lower() == ".toml":
        return parse_as(PreprocessSpec, text, f"'{path}'")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PatchlightError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PatchlightError(f"'{path}' contains a {type(content).__name__}; give an object with size, mean, std, …")
    return _checked(content, f"'{path}'")


def _checked(fields: Mapping[str, Any], where: str) -> PreprocessSpec:
    known = PreprocessSpec.model_fields
    unknown = next((key for key in fields if key not in known), None)
    if unknown is not None:
        raise PatchlightError(f"{where} has no field '{unknown}'; {nearest(str(unknown), known)}")
    try:
        return PreprocessSpec.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise PatchlightError(f"{where}: '{name}': {first['msg']}, not {first['input']!r}") from error


def _from_folder(folder: Path) -> Preprocess:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise missing_extra(f"the image processor in '{folder}' needs", "transformers", "hf") from error
    return as_processed(read_processor(str(folder), {"local_files_only": True}), 3, f"'{folder}'")

"""manifest.json: what a run is, and what it was begun with."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from patchlight.bench.plan import Images
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import FORMAT
from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_atomic
from patchlight.core.fingerprints import json_digest

MERGED = "merged from"
"""How notes begin that say where a run's values come from."""


class PlannedGroup(BaseModel):
    """A group as the manifest lists it."""

    model_config = ConfigDict(frozen=True)

    key: str
    model: str
    methods: tuple[str, ...]
    batch_size: int


class Manifest(BaseModel):
    """A run: the recipe as it was run, overrides and all; its text; and what a resumed run must have in common with it.

    `versions` are those it was begun with, `code` the hash of the code it was last planned with, `plan` that of the
    plan (empty where one is yet to be made). `models` are the hashes of the models as they were loaded, `classes` that
    of the data's class names, `made` those of every method under every metric: by these, runs know whether they belong
    together.
    """

    model_config = ConfigDict(frozen=True)

    resolved: Recipe
    recipe: str
    quick: bool
    notes: tuple[str, ...]
    device: str
    chunk: int
    threads: int
    versions: dict[str, str]
    code: str
    plan: str
    groups: tuple[PlannedGroup, ...]
    images: Images
    models: dict[str, str] = {}
    classes: str = ""
    made: dict[str, dict[str, str]] = {}

    @property
    def values(self) -> int:
        """How many values the run has when it is complete."""
        return len(self.images.names) * len(self.resolved.metrics) * sum(len(g.methods) for g in self.groups)

    def incomplete(self, done: int, where: str = "") -> str:
        """How many values are missing when `done` are there, in words; empty for a complete run."""
        missing = self.values - done
        return f"Incomplete: {missing} of {self.values} values are missing{where}" if missing > 0 else ""


def read_manifest(path: Path) -> Manifest | None:
    """The manifest in a file; None where there is none. One that is damaged, or of another format, is refused."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PatchlightError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        told = None
    made = told.get("format") if isinstance(told, dict) else None
    if isinstance(made, int) and not isinstance(made, bool) and made != FORMAT:
        newer = made > FORMAT
        raise PatchlightError(
            f"'{path.parent}' was made by {'a newer' if newer else 'an earlier'} Patchlight (format {made}, here "
            f"{FORMAT}); {'update Patchlight to read it' if newer else 'give another --out, and run it again'}"
        )
    damaged = f"'{path}' is damaged; delete it, and the same `bench run` goes on with what is done"
    if not isinstance(told, dict) or told.pop("sum", None) != json_digest(told):
        raise PatchlightError(damaged)
    try:
        return Manifest.model_validate(told)
    except ValidationError as error:
        raise PatchlightError(damaged) from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest, with its format and its checksum."""
    content = json.loads(json.dumps({"format": FORMAT, **manifest.model_dump(mode="json")}))
    write_atomic(path, json.dumps({**content, "sum": json_digest(content)}, indent=1).encode(), durable=True)

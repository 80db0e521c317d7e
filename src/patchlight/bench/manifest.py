"""manifest.json: the recipe, plan, images and versions of a run."""

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
"""First words of the notes on the runs that were merged."""


class PlannedGroup(BaseModel):
    """A group in the manifest."""

    model_config = ConfigDict(frozen=True)

    key: str
    model: str
    methods: tuple[str, ...]
    batch_size: int


class Manifest(BaseModel):
    """A run: its recipe with all overrides, and everything that a resumed or merged run must share with it.

    Attributes:
        resolved: The recipe with all overrides.
        recipe: The recipe's text.
        versions: Versions of the libraries when the run was started.
        code: Hash of Patchlight's code when the run was last planned.
        plan: Hash of the plan; empty for a merged run that has not been planned.
        models: Hashes of the models as loaded, by label.
        classes: Hash of the data's class names.
        made: Hashes of every method under every metric: names, settings and code.
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
        """The number of values of the complete run."""
        return len(self.images.names) * len(self.resolved.metrics) * sum(len(g.methods) for g in self.groups)

    def incomplete(self, done: int, where: str = "") -> str:
        """A sentence with the number of missing values if `done` exist; empty for a complete run."""
        missing = self.values - done
        return f"Incomplete: {missing} of {self.values} values are missing{where}" if missing > 0 else ""


def read_manifest(path: Path) -> Manifest | None:
    """Read a manifest; None if the file does not exist, an error if it is damaged or has another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PatchlightError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        content = None
    number = content.get("format") if isinstance(content, dict) else None
    if isinstance(number, int) and not isinstance(number, bool) and number != FORMAT:
        newer = number > FORMAT
        raise PatchlightError(
            f"'{path.parent}' was written by {'a newer' if newer else 'an earlier'} version of Patchlight (format "
            f"{number}; this version reads {FORMAT}); "
            + ("update Patchlight to read it" if newer else "run the recipe again with another --out")
        )
    damaged = f"'{path}' is damaged; delete it, and the same `bench run` resumes with the values that exist"
    if not isinstance(content, dict) or content.pop("sum", None) != json_digest(content):
        raise PatchlightError(damaged)
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise PatchlightError(damaged) from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest with its format and checksum."""
    content = json.loads(json.dumps({"format": FORMAT, **manifest.model_dump(mode="json")}))
    write_atomic(path, json.dumps({**content, "sum": json_digest(content)}, indent=1).encode(), durable=True)

"""Reference pages for the command line, recipes, errors and public names, generated from the code."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import patchlight
from patchlight.anatomy.spec import ModelSpec, PreprocessSpec
from patchlight.bench.recipe import Published, Quick, Recipe
from patchlight.cli import app
from patchlight.core import errors
from patchlight.core.registry import describe_type, settings_of
from patchlight.data import KINDS
from patchlight.data.spec import DataSpec
from patchlight.study.spec import MethodSpec, MetricSpec
from tools.docs.words import as_markdown, code, paragraphs, table

SOURCE = Path(patchlight.__file__).parent
PUBLIC: dict[str, tuple[str, ...]] = {
    "A model": ("load", "wrap", "list_models", "find_registers", "Anatomy", "Preprocess"),
    "Questions": (
        "heads.Texts",
        "heads.Similar",
        "heads.Prototypes",
        "heads.Linear",
        "heads.Neurons",
    ),
    "Explaining": (
        "explain",
        "list_methods",
        "Attribution",
        "Attributions",
        "interactions",
        "Interactions",
        "sufficient_sets",
        "SufficientSets",
    ),
    "Measuring": ("evaluate", "compare", "list_metrics", "open_data", "Evaluation", "Evaluations", "Comparison"),
    "Choosing": ("recommend", "Verdict", "choose_start", "StartChoice"),
    "Showing": ("figure", "show"),
    "The raw evidence": ("trace", "Evidence"),
    "Trained explainers": (
        "diffmask.train",
        "diffmask.load",
        "diffmask.DiffMaskSettings",
        "shapley.train",
        "shapley.load",
    ),
    "During training": ("callbacks.TrainingLog", "callbacks.log_maps"),
    "Runs of the benchmark": ("bench.open", "bench.Store"),
    "Extending": (
        "load_plugin",
        "layer_map",
        "own_passes",
        "ablates",
        "register_metric",
        "register_rule",
        "register_composition",
        "register_family",
        "register_data",
        "Ask",
        "LayerJob",
        "LayerMaps",
        "Composition",
        "Rule",
        "TokenSubsets",
        "PixelMasks",
        "Measure",
        "Measured",
    ),
}
"""The public names by purpose; errors and warnings have their own page."""
WARNINGS = ("PatchlightError", "Unsupported", "DegenerateMap", "UndefinedMetric", "AssumedPreprocess")
CONSTANTS = ("LAST", "FIRST", "SUM", "PLUS", "SKIPPLUS", "ADDITIVE", "ROLLOUT")
MEMBERS = {"Attribution", "Attributions", "Evaluation", "Evaluations", "Comparison", "Verdict", "Preprocess", "Store"}
"""Classes whose methods a user calls."""


def public(name: str) -> Any:
    """Return the object behind a public name, such as `bench.open`."""
    value: Any = patchlight
    for part in name.split("."):
        value = getattr(value, part)
    return value


def api() -> str:
    """The public names with their docstrings, by autodoc."""
    parts = [
        "# Python",
        "`import patchlight as pl` provides these names; everything else is private by convention. Each is loaded "
        "when it is first used, so the import is fast.",
    ]
    for heading, names in PUBLIC.items():
        parts.append(f"## {heading}")
        for name in names:
            kind = "class" if inspect.isclass(public(name)) else "function"
            members = name.rpartition(".")[2] in MEMBERS or name in ("Anatomy", "Ask", "Measure", "LayerMaps")
            options = "   :members:\n   :member-order: bysource\n" if kind == "class" and members else ""
            parts.append(f"```{{eval-rst}}\n.. auto{kind}:: patchlight.{name}\n{options}```")
    constants = ", ".join(f"`pl.{name}`" for name in CONSTANTS)
    parts.append(
        f"Compositions for your own layer maps (`combine=`): {constants}. "
        "[Methods and their names](../methods.md#names-compose) describes them."
    )
    return "\n\n".join(parts) + "\n"


def commands(command: Any, name: str = "patchlight") -> Iterator[tuple[str, Any]]:
    """Every command with its full name; groups of commands are left out."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield name, command
    for word, one in inner.items():
        yield from commands(one, f"{name} {word}")


def _argument(one: Any) -> str:
    """An argument as `--help` calls it."""
    return str(one.metavar or one.name.upper()).strip("[]").removesuffix("...")


def _used(one: Any) -> str:
    """An argument as it stands in a command: in brackets where it may be left out."""
    word = _argument(one) + "..." * (one.nargs == -1)
    return word if one.required else f"[{word}]"


def command_line() -> str:
    """Every command, its arguments and options, from typer."""
    parts = [
        "# Command line",
        "`patchlight --help` and `patchlight COMMAND --help` print the same. `patchlight --install-completion` lets "
        "the shell complete methods, metrics, models, settings and presets. Exit codes: 0 done; 2 wrong request, with "
        "an error message; 3 some images failed, the others are done; 75 stopped on request, the same command resumes.",
    ]
    examples = tomllib.loads((SOURCE / "cli" / "help.toml").read_text(encoding="utf-8"))["examples"]["commands"]
    for name, command in commands(typer.main.get_command(app)):
        given = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        usage = " ".join([name, *map(_used, given), "[OPTIONS]"])
        block = "\n".join([usage, "", *(line for line in examples if f"{line} ".startswith(f"{name} "))]).strip()
        parts += [f"## {name}", as_markdown(" ".join((command.help or "").split())), f"```text\n{block}\n```"]
        rows = [(code(_argument(one)), as_markdown(one.help or ""), "") for one in given]
        rows += [
            (
                ", ".join(code(word) for word in (*one.opts, *one.secondary_opts)),
                as_markdown(" ".join((one.help or "").split())),
                "" if one.default in (None, False, [], ()) or callable(one.default) else code(one.default),
            )
            for one in options
        ]
        if rows:
            parts.append(table(("option", "meaning", "default"), rows))
    return "\n\n".join(parts) + "\n"


def _kind(kind: Any) -> str:
    """A type in plain words, limits aside."""
    origin, inside = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        return _kind(kind.__origin__)
    if origin is dict:
        return f"a table of {_kind(inside[1])} by name"
    if origin in (tuple, list):
        return f"a list of {_kind(inside[0])}"
    if origin in (Union, UnionType):
        return " or ".join(_kind(part) for part in inside if part is not NoneType)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"`{kind.__name__}`"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Any: "a value"}
    return words.get(kind) or describe_type(kind)


def _fields(model: type[BaseModel]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        if name == "stands_for":
            continue
        default = field.get_default(call_default_factory=True)
        needed = default is PydanticUndefined
        plain = not isinstance(default, BaseModel)
        rows.append(
            (
                code(name),
                as_markdown(_kind(field.annotation)),
                "required" if needed else code(repr(default)) if plain else "",
            )
        )
    return table(("key", "type", "default"), rows)


def recipe_format() -> str:
    """The keys of a recipe, from the models that check it."""
    parts = [
        "# Recipe format",
        "A recipe is a TOML file; [Benchmarks](../benchmark.md#recipes) has a complete example with comments. This "
        "page lists its parts and keys. An unknown key is refused, and the error names its line.",
    ]
    titles: dict[str, type[BaseModel]] = {
        "The recipe": Recipe,
        "A model": ModelSpec,
        "Its preprocessing": PreprocessSpec,
        "The data": DataSpec,
        "A method": MethodSpec,
        "A metric": MetricSpec,
        "Published numbers": Published,
        "Quick settings": Quick,
    }
    for title, model in titles.items():
        text = "\n\n".join(map(as_markdown, paragraphs(model)))
        parts += [f"## {title}", f"`{model.__name__}`: {text}", _fields(model)]
    rows = (
        (
            code(name),
            as_markdown(one.summary),
            ", ".join(code(key) for key in settings_of(one.function)) or "–",
        )
        for name, one in KINDS.items()
    )
    parts += ["## Kinds of data", "[Data](../data.md) describes them.", table(("kind", "contents", "options"), rows)]
    return "\n\n".join(parts) + "\n"


def _spoken(node: ast.expr) -> str:
    """A string or f-string of the code, with … for inserted values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _spoken(node.left) + _spoken(node.right)
    return ""


def sentences(file: Path) -> Iterator[tuple[str, str]]:
    """The errors and warnings of a file: their class and message."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        name, text = node.func.id, " ".join(_spoken(node.args[0]).split())
        if name == "warn" and len(node.args) > 1 and isinstance(node.args[1], ast.Name):
            name = node.args[1].id
        if name in vars(errors) and len(text.replace("…", "").split()) > 2:
            yield name, text


def error_page() -> str:
    """Errors and warnings: classes, common messages, and all messages."""
    parts = [
        "# Errors and warnings",
        "The message of an error states what went wrong, what was given and what to do. The command line prints it "
        "and exits with code 2; in Python it is one of these:",
        table(
            ("class", "when"),
            ((code(f"pl.{name}"), as_markdown(paragraphs(public(name))[0])) for name in WARNINGS),
        ),
        "`Unsupported` is a subclass of `PatchlightError`, which is a subclass of `ValueError`. "
        '`warnings.filterwarnings("error", category=pl.DegenerateMap)` turns a warning into an error.',
        "## Common messages",
        table(
            ("message", "what to do"),
            (
                (
                    "… does not work here: …; these do: …",
                    "the model lacks something that the method needs; use one of the methods named, or see "
                    "[which methods work on which models](families/index.md)",
                ),
                (
                    "no method is called …; did you mean …",
                    "`patchlight methods` lists them; [names compose](../methods.md#names-compose)",
                ),
                (
                    "… gives other logits than its embedding, blocks and head put together …",
                    "the model's forward does more than its parts: [models of your own](../own-models.md)",
                ),
                ("`DegenerateMap`", "the map is not informative; the warning names another method or setting"),
                (
                    "`AssumedPreprocess`",
                    "describe how images are prepared: [`preprocess=`](../own-models.md#how-images-are-prepared)",
                ),
            ),
        ),
        "## All messages",
        "Messages as in the code, with … for inserted values, so that a search for an error finds it here.",
    ]
    rooms: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        rooms.setdefault(room, []).extend(sentences(file))
    for room, texts in rooms.items():
        if texts:
            rows = sorted({(code(name), as_markdown(text)) for name, text in texts}, key=lambda row: row[1].casefold())
            parts += [f"### {room}", table(("class", "message"), rows)]
    return "\n\n".join(parts) + "\n"


def write(folder: Path) -> None:
    """Write all manual pages to the staged folder."""
    (folder / "reference").mkdir(parents=True, exist_ok=True)
    pages = {"api": api(), "cli": command_line(), "recipe": recipe_format(), "errors": error_page()}
    for name, text in pages.items():
        (folder / "reference" / f"{name}.md").write_text(text, encoding="utf-8")

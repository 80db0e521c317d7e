"""The page about the architecture names what exists, and the source keeps its rules: names, sizes, private names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import patchlight as pl

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
JOURNEYS = {
    section.partition("\n")[0]: re.findall(r"^\d+\. .*$", section, re.MULTILINE)
    for section in PAGE.split("\n## ")[1:]
    if section.startswith("One ")
}
NAMES = sorted(set(re.findall(r"`(patchlight\.[\w.]+)`", PAGE)))


def test_there_are_three_journeys_of_at_most_eight_steps() -> None:
    assert [title.split(":")[0] for title in JOURNEYS] == ["One image", "One map", "One recipe"]
    for title, hops in JOURNEYS.items():
        assert 3 <= len(hops) <= 8, title
        assert all("`patchlight." in hop for hop in hops), f"{title}: a step names no function"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_exists_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:  # a method of a class
        module, _, kind = module.rpartition(".")
        home = getattr(importlib.import_module(module), kind)
        module = home.__module__
    found = getattr(home, attribute)
    if inspect.isroutine(found) or inspect.isclass(found):
        assert found.__module__ == module, f"{attribute} is at home in {found.__module__}"


def test_every_room_is_on_the_page() -> None:
    home = ROOT / "src" / "patchlight"
    rooms = [p.name for p in home.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()]
    rooms = [name if name.endswith(".py") else f"{name}/" for name in rooms]
    missing = [name for name in rooms if f"`{name}`" not in PAGE]
    assert not missing, f"docs/architecture.md says nothing about {missing}"


def test_every_public_name_is_on_the_page() -> None:
    table = PAGE.partition("\n## Public names\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", table)
    assert sorted(named) == pl.__all__


SOURCE = ROOT / "src" / "patchlight"
FILES = {file.relative_to(SOURCE).as_posix(): file for file in sorted(SOURCE.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    """A file of the source, parsed."""
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def attributes(name: str) -> set[str]:
    """The names that a file reads as attributes."""
    return {node.attr for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)}


SETTINGS = {"layer_map", "own_passes", "ablates", "register_metric", "register_composition"}
"""Decorators of functions whose parameters are the settings that users give."""


def test_there_are_at_most_five_modules_at_the_top_level() -> None:
    assert len(list((ROOT / "src" / "patchlight").glob("*.py"))) <= 5


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for name in FILES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_functions_have_at_most_eight_parameters() -> None:
    """Outside the command line and the public names, whose keywords are for users."""
    long = [
        f"{name}:{node.lineno} {node.name}"
        for name in FILES
        if not name.startswith("cli/") and not name.endswith("kernels.py")  # a kernel takes numbers alone
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and _parameters(node) > 8
        and not _public(node, FILES[name])
    ]
    assert not long


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([one for one in every if one.arg not in ("self", "cls")])


def _public(node: ast.FunctionDef | ast.AsyncFunctionDef, file: Path) -> bool:
    decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
    registers = bool(decorators & SETTINGS) or any(name.endswith("_metric") for name in decorators)
    return registers or node.name in pl.__all__ or node.name in PUBLIC.get(file.name, ())


PUBLIC = {
    "opened.py": {"__init__"},  # pl.Anatomy, which authors of families call
    "log.py": {"__init__"},  # pl.callbacks.TrainingLog
    "answer.py": {"__init__"},  # pl.heads.Answer
    "base.py": {"draw"},  # patchlight.report.figures.draw
    "train.py": {"train"},  # pl.diffmask.train, pl.shapley.train
    "heat.py": {"overlay"},  # Attribution.overlay
    "testing.py": {"check_metric"},
    "taps.py": {"scaled_dot_product_attention"},  # torch's own signature
}
"""By file, further functions that users call."""


ONLY = {
    "interpolate": {"core/resize.py", "methods/mda.py"},
    "log_softmax": {"core/targets.py"},
    "logsigmoid": {"core/targets.py", "trained/diffmask/hard_concrete.py"},
    "kl_div": set(),
    "index_select": {"anatomy/opened.py", "anatomy/transcript.py"},
}
"""By the name of a torch function, the files that call it: the upsampler (and MDA's squares, which its
authors average with soft borders), log-probabilities (and those of DiffMask's
gates, which are of no class), the gatherers of tokens and of a language model's arguments. KL is
`targets.kl_divergence`."""


@pytest.mark.parametrize("name", ONLY)
def test_one_place_calls(name: str) -> None:
    assert {file for file in FILES if name in attributes(file)} == ONLY[name]


def test_types_of_settings_are_defined_once() -> None:
    """Two methods whose settings may have the same values share the type."""
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for node in tree(file).body if file.startswith("methods/") else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Annotated["):
                homes.setdefault(ast.unparse(node), []).append(file)
    assert not {what: files for what, files in homes.items() if len(files) > 1}


OF_LIBRARIES = {
    "sys": {"_getframe"},
    "os": {"_exit"},
    "functools": {"_lru_cache_wrapper"},
    "concurrent.futures": {"_processes"},  # Python 3.14 has kill_workers
    "named tuples": {"_fields", "_replace"},
    "torch": {"_softmax_backward_data", "_weight_norm", "_version", "_C", "_set_grad_enabled"}
    | {f"_foreach_{name}" for name in ("add_", "copy_", "lerp", "lerp_", "mul_")}
    | {"_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}
    | {f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "cudnn")},
    "nn.Module": {"_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"},
    "timm": {"_pos_embed", "_get_rel_pos_bias"},
    "torchvision": {"_process_input"},
    "transformers": {"_from_config"},
    "open_clip": {"_embeds", "_pool"},
}
"""Names with an underscore that are not ours, by whose they are."""
OPENED = {"anatomy/opened.py", "anatomy/twin.py", "bench/code.py", "testing.py"}
"""Files that copy, compare or describe whatever an object holds, and so read its `__dict__`."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def reaches(module: ast.Module) -> Iterator[str]:
    """Where a file uses a private name that it does not define: the line and the name."""
    own = {name for node in ast.walk(module) for name in _defined(node)}
    allowed = own.union(*OF_LIBRARIES.values())
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("patchlight")):
            yield from (f"{node.lineno} {alias.name}" for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in allowed:
            yield f"{node.lineno} {node.attr}"


def _defined(node: ast.AST) -> Iterator[str]:
    """The names a statement gives to a module, a class or `self`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_private_names_stay_in_their_file() -> None:
    """Classes and functions whose names begin with an underscore are used where they are defined."""
    assert not {name: lines for name in FILES if (lines := list(reaches(tree(name))))}


def test_only_what_copies_or_describes_objects_reads_their_dict() -> None:
    assert {name for name in FILES if "__dict__" in attributes(name)} <= OPENED


def test_no_class_overrides_a_private_method_of_another_file() -> None:
    defined = {
        (file, node.name): (
            {base.id for base in node.bases if isinstance(base, ast.Name)},
            {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef) and private(inner.name)},
        )
        for file in FILES
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ClassDef)
    }
    for (file, name), (bases, own) in defined.items():
        for (other, base), (_, theirs) in defined.items():
            if base in bases and other != file:
                assert not own & theirs, f"{name} in {file} overrides {own & theirs}"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("from patchlight.engine import _attribution", True),
        ("from .engine import _attribution", True),
        ("def f(vit):\n    return vit._twin", True),
        ("class A(B):\n    def f(self):\n        return self._of_b", True),
        ("class A(B):\n    def _f(self, other):\n        other._g = 1\n        return super()._g()", True),
        ("import _thread\nfrom patchlight.engine import explain", False),
        (
            "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, o):\n        return o._x",
            False,
        ),
        ("_X = 1\ndef f(model):\n    return model._modules, model.__dict__", False),
    ],
)
def test_private_names_of_others_are_seen(text: str, seen: bool) -> None:
    assert bool(list(reaches(ast.parse(text)))) == seen

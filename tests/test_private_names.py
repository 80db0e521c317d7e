"""No module reaches into another's private names: what begins with an underscore is used where it is defined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import patchlight

SOURCE = Path(patchlight.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
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


def reaches(text: str) -> Iterator[tuple[int, str]]:
    """Where a file uses a private name that it does not define: the line, and the name."""
    tree = ast.parse(text)
    own = {name for node in ast.walk(tree) for name in _defined(node)}
    allowed = own.union(*OF_LIBRARIES.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("patchlight")):
            yield from ((node.lineno, alias.name) for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in allowed:
            yield node.lineno, node.attr


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


def methods(text: str) -> dict[str, tuple[set[str], set[str]]]:
    """By class, its bases' names and the private methods it defines."""
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    return {
        c.name: (
            {b.id for b in c.bases if isinstance(b, ast.Name)},
            {f.name for f in c.body if isinstance(f, ast.FunctionDef) and private(f.name)},
        )
        for c in classes
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_private_names_stay_in_their_file(file: Path) -> None:
    found = [f"{file.name}:{line} uses {name}" for line, name in reaches(file.read_text())]
    assert not found, "; ".join(found)


def test_only_what_copies_or_describes_objects_reads_their_dict() -> None:
    readers = {
        file.relative_to(SOURCE).as_posix()
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "__dict__"
    }
    assert readers <= OPENED


def test_no_class_overrides_a_private_method_of_another_file() -> None:
    defined = {file: methods(file.read_text()) for file in FILES}
    for file, classes in defined.items():
        for name, (bases, own) in classes.items():
            for other, theirs in defined.items():
                for base in bases & theirs.keys() if other != file else ():
                    assert not own & theirs[base][1], f"{name} in {file.name} overrides {own & theirs[base][1]}"


@pytest.mark.parametrize(
    "text",
    [
        "from patchlight.engine import _attribution",
        "from .engine import _attribution",
        "def f(vit):\n    return vit._twin",
        "class A(B):\n    def f(self):\n        return self._of_b",
        "class A(B):\n    def _f(self, other):\n        other._g = 1\n        return super()._g()",
    ],
)
def test_the_walk_sees_a_reach(text: str) -> None:
    assert list(reaches(text))


@pytest.mark.parametrize(
    "text",
    [
        "import _thread\nfrom patchlight.engine import explain",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other: 'A'):\n        return other._x",
        "_X = 1\ndef f(model):\n    return model._modules, model.__dict__",
    ],
)
def test_the_walk_lets_own_names_be(text: str) -> None:
    assert not list(reaches(text))

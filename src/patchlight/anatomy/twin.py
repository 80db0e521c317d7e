"""A twin of the user's model: module copies that share its weights, so that the user's model is only read.

Evaluation mode, hooks and other number types belong to the twin; other threads may train or run the model itself.
"""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.watching import Activation
from patchlight.core.errors import PatchlightError

_TENSORS = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = (*_TENSORS, "_modules", *_HOOKS)
_AUTOCAST = "_original_forward"
"""Attribute in which Accelerate keeps the forward that it wrapped in autocast."""
_ACTIVATION_NAME = re.compile(r"(.*_)?act(ivation)?(_fn)?|(quick_)?gelu")
_SEEN_BY_TAPS = (nn.GELU, nn.SiLU, nn.ReLU, nn.Identity, nn.Dropout)
_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)


class Twin:
    """A structural copy of `model` in evaluation mode that shares the memory of its weights.

    With `dtype` its floating-point weights (of the module types in `only`) are a cast copy, except those of modules at
    `spared` paths that it would widen. `renew` creates the copy and updates it after changes to the model.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        only: tuple[type[nn.Module], ...] | None = None,
        spared: tuple[str, ...] = (),
    ) -> None:
        self.model, self.dtype, self._only, self._spared = model, dtype, only, spared
        self._lock = threading.Lock()
        self._seen: _Seen | None = None
        self._cast: list[tuple[Tensor, Tensor]] = []
        self._written: list[int] = []

    def renew(self, prepare: Callable[[nn.Module], None]) -> bool:
        """Update the copy: cast weights are copied again, a changed structure is rebuilt.

        `prepare` is called with every new copy, to add hooks. Returns whether the structure had changed (modules,
        parameters, hooks, plain attributes, or the memory of weights).
        """
        if self._unchanged():
            self._follow()
            return False
        with self._lock:
            if not self._unchanged():
                self._build(prepare)
        return True

    def _follow(self) -> None:
        """Copy the weights that are cast.

        If torch counts no change, they are written without increasing its version counter, so computations of other
        threads stay valid, and weights changed through `.data` are copied too.
        """
        if not self._cast:
            return
        before, self._written = self._written, _versions(theirs for _, theirs in self._cast)
        mine = [own if before != self._written else own.data for own, _ in self._cast]
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_(mine, [theirs for _, theirs in self._cast])

    def _build(self, prepare: Callable[[nn.Module], None]) -> None:
        originals = _modules(self.model)
        state = _Seen(originals)
        self._cast = []
        kinds = self._only or (nn.Module,)
        some = (m for m in originals if isinstance(m, kinds))
        self._narrow = {id(m) for path in self._spared for m in self.model.get_submodule(path).modules()}
        self._narrow = {id(t) for m in originals if id(m) in self._narrow for t in m._parameters.values()}
        self._casting = {id(t) for m in some for kind in _TENSORS for t in m.__dict__[kind].values() if t is not None}
        with torch.inference_mode(False), torch.no_grad():
            copies = _Copies(originals, self._twin_tensor)
        for module in copies.modules.values():
            _wrap_activations(module)
        self.moved = copies.moved
        self._written = _versions(theirs for _, theirs in self._cast)
        prepare(copies.modules[id(self.model)])
        self._seen = state

    def _twin_tensor(self, tensor: Tensor) -> Tensor:
        """The twin's tensor for one of the model's: the same memory, unless it must have another type."""
        lowers = self.dtype is not None and id(tensor) in self._casting
        changes = lowers and tensor.is_floating_point() and tensor.dtype != self.dtype
        if changes and id(tensor) in self._narrow and self.dtype is not None and tensor.itemsize < self.dtype.itemsize:
            changes = False
        if not changes and not tensor.is_inference():
            return tensor.detach()
        mine = tensor.detach().to(self.dtype) if changes else tensor.clone()
        self._cast.append((mine, tensor.detach()))
        return mine

    def _unchanged(self) -> bool:
        """Whether every module is unchanged since it was copied, except for its mode."""
        return self._seen is not None and self._seen.holds()


class _Seen:
    """The state of modules when they were copied: attributes, contents of their dictionaries, memory of tensors."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.states = [(m.__dict__, dict(m.__dict__)) for m in map(_uncompile, modules)]
        self.tables = [m.__dict__[name] for m in modules for name in _TABLES]
        self.inside = self._inside()
        self.tensors = [t for t in self.inside if type(t) in (nn.Parameter, Tensor)]
        self.places = [t.data_ptr() for t in self.tensors]

    def _inside(self) -> list[Any]:
        return [value for table in self.tables for value in table.values()]

    def holds(self) -> bool:
        inside = self._inside()
        if len(inside) != len(self.inside) or not all(map(operator.is_, inside, self.inside)):
            return False
        if [t.data_ptr() for t in self.tensors] != self.places:
            return False
        try:
            for now, before in self.states:
                before["training"] = now.get("training")
                if now != before:  # identical values need no comparison
                    return False
        except Exception:  # comparisons of tensors and arrays are not booleans
            return False
        return True


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Torch's version counter of each tensor; inference tensors have none."""
    return [0 if t.is_inference() else t._version for t in tensors]


def _modules(model: nn.Module) -> list[nn.Module]:
    """Every module of a model once, including those in plain attributes and lists."""
    modules = {id(model): model}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule):
            raise PatchlightError("a TorchScript module cannot be inspected; give the model before it is scripted")
        for value in module.__dict__.values():
            for member in _members(value):
                if id(member) not in modules:
                    modules[id(member)] = member
                    waiting.append(member)
    return list(modules.values())


def _members(value: Any) -> Iterable[nn.Module]:
    if isinstance(value, nn.Module):
        return (value,)
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return (m for m in values if isinstance(m, nn.Module))


class _Copies:
    """Copies of modules, and of everything else that contains them.

    A tensor that several modules share is shared by their copies too.
    """

    def __init__(self, originals: list[nn.Module], convert: Callable[[Tensor], Tensor]) -> None:
        self.modules: dict[int, nn.Module] = {id(m): object.__new__(type(m)) for m in originals}
        """By the id of the original."""
        self._tensors: dict[int, Tensor] = {}
        for original in originals:
            state = {key: self.moved(value, convert) for key, value in original.__dict__.items()}
            for name in _TABLES:
                table = original.__dict__[name]
                state[name] = type(table)((k, self.moved(v, convert)) for k, v in table.items())
            state["training"] = False
            if _AUTOCAST in state:
                state["forward"] = state.pop(_AUTOCAST)
            state.pop("_compiled_call_impl", None)  # the original would run
            self.modules[id(original)].__dict__.update(state)

    def moved(self, value: Any, convert: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
        """A value with the model's modules in it replaced by their copies; closures are not changed."""
        if isinstance(value, nn.Module):
            return self.modules.get(id(_uncompile(value)), value)
        if isinstance(value, Tensor):
            return self._tensor(value, convert)
        if isinstance(value, MethodType) and id(value.__self__) in self.modules:
            return MethodType(value.__func__, self.modules[id(value.__self__)])
        if isinstance(value, partial):
            named = {k: self.moved(v, convert) for k, v in value.keywords.items()}
            return partial(self.moved(value.func, convert), *(self.moved(v, convert) for v in value.args), **named)
        if type(value) in (list, tuple) and any(True for _ in _members(value)):
            return type(value)(self.moved(v, convert) for v in value)
        if type(value) is dict and any(True for _ in _members(value)):
            return {k: self.moved(v, convert) for k, v in value.items()}
        return value

    def _tensor(self, value: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        if id(value) not in self._tensors:
            mine = convert(value)
            plain = isinstance(value, nn.Parameter) and type(mine) is Tensor
            self._tensors[id(value)] = nn.Parameter(mine, requires_grad=False) if plain else mine
        return self._tensors[id(value)]


_DATA = (str, bytes, int, float, complex, NoneType, list, tuple, dict, np.ndarray, torch.dtype, torch.device)
_LIBRARY = (type, ModuleType, BuiltinFunctionType, MethodDescriptorType)


def on_copies(value: Any, moved: Callable[[Any], Any], done: dict[int, FunctionType] | None = None) -> Any:
    """A user's function that runs the copies of a model's modules wherever it refers to the modules.

    Its closure, its defaults, the globals of its file and the functions there are searched.

    Args:
        value: The function, or a value that it refers to.
        moved: From a value to the same value with modules replaced by their copies.
        done: The functions that are replaced already, by the ids of the originals.

    Raises:
        LookupError: It refers to an object that may contain the modules.
    """
    done, copied = {} if done is None else done, moved(value)
    if isinstance(copied, partial):
        return partial(on_copies(copied.func, moved, done), *copied.args, **copied.keywords)
    if copied is not value or isinstance(value, _DATA + _LIBRARY) or id(value) in done:
        return done.get(id(value), copied)
    if isinstance(value, nn.Module) and all(moved(module) is module for module in value.modules()):
        return value  # not a part of the model
    if not isinstance(value, FunctionType):
        raise LookupError(type(value.__self__ if isinstance(value, MethodType) else value).__name__)
    cells, names = tuple(CellType() for _ in value.__closure__ or ()), dict(value.__globals__)
    function = FunctionType(value.__code__, names, value.__name__, moved(value.__defaults__), cells)
    function.__kwdefaults__ = moved(value.__kwdefaults__)
    done[id(value)] = function
    for cell, theirs in zip(cells, value.__closure__ or (), strict=True):
        cell.cell_contents = on_copies(theirs.cell_contents, moved, done)
    for name in _names(value.__code__) & names.keys():
        if getattr(names[name], "__globals__", value.__globals__) is value.__globals__:  # functions of libraries stay
            names[name] = on_copies(names[name], moved, done)
    return function


def _names(code: CodeType) -> set[str]:
    """The names of globals that a function may read, also in functions that it defines."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inside)


def _uncompile(module: nn.Module) -> nn.Module:
    """The module given to `torch.compile`, which the compiled module would run."""
    inner = module.__dict__["_modules"].get("_orig_mod")
    return module if inner is None else _uncompile(inner)


def _wrap_activations(module: nn.Module) -> None:
    """Let taps observe the elementwise activations among a module's children as single operations."""
    for name, child in module._modules.items():
        if child is None or child._modules or isinstance(child, _SEEN_BY_TAPS + _NOT_ELEMENTWISE):
            continue
        if type(child).__module__ == "torch.nn.modules.activation" or _ACTIVATION_NAME.fullmatch(name):
            module._modules[name] = Activation(child)


class PatchProduct(nn.Conv2d):
    """A convolution of adjacent patches as one matrix product: six times as fast in bfloat16."""

    def forward(self, images: Tensor) -> Tensor:
        (batch, channels), (p, q) = images.shape[:2], self.kernel_size
        rows, columns = images.shape[2] // p, images.shape[3] // q
        patches = images[..., : rows * p, : columns * q].reshape(batch, channels, rows, p, columns, q)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        out: Tensor = F.linear(patches, self.weight.flatten(1), self.bias).mT.unflatten(2, (rows, columns))
        return out


_PLAIN = ((0, 0), (1, 1), 1)


def _cuts_patches(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a plain convolution with adjacent windows."""
    if type(module) is not nn.Conv2d or "forward" in vars(module):
        return False
    return module.kernel_size == module.stride and (module.padding, module.dilation, module.groups) == _PLAIN


def multiply_patches(root: nn.Module) -> None:
    """Replace the patch projections of a twin by matrix products."""
    for module in root.modules():
        if _cuts_patches(module):
            module.__class__ = PatchProduct

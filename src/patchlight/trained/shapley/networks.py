"""The networks of ViT-Shapley: changed copies of a model, the layers that predict the values, and the explainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.layout import Layout
from patchlight.evidence.coalitions import coalition_logits, no_coalitions
from patchlight.trained.explainer import Explainer
from patchlight.zoo import ZOO


class Change(nn.Module):
    """The trained additions to weights, by weight name: a low-rank product `left @ right`, or a full tensor (`whole`).

    Names have / instead of dots.
    """

    def __init__(self, whole: Mapping[str, Tensor], left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.whole, self.left, self.right = (
            nn.ParameterDict({k.replace(".", "/"): nn.Parameter(v) for k, v in tensors.items()})
            for tensors in (whole, left, right)
        )

    @classmethod
    def new(cls, weights: Mapping[str, Tensor], low_rank: set[str], rank: int | None, seed: int) -> Change:
        """A zero change of `weights`; those in `low_rank` get matrices of a rank if that takes fewer numbers."""
        generator = torch.Generator().manual_seed(seed)
        whole, left, right = {}, {}, {}
        for name, value in weights.items():
            if rank is None or name not in low_rank or value.ndim != 2 or rank * sum(value.shape) >= value.numel():
                whole[name] = torch.zeros(value.shape)
                continue
            rows, columns = value.shape
            left[name] = torch.zeros(rows, rank)
            right[name] = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        return cls(whole, left, right)

    @property
    def device(self) -> str:
        return next((p.device.type for p in self.parameters()), "cpu")

    @property
    def empty(self) -> bool:
        """Whether there are no additions."""
        return not self.whole and not self.left

    def additions(self) -> dict[str, Tensor]:
        """The additions by weight name."""
        with torch.autocast(self.device, enabled=False):  # full precision, as in the finished explainer
            low = {name: self.left[name] @ self.right[name] for name in self.left}
        return {name.replace("/", "."): value for name, value in [*self.whole.items(), *low.items()]}

    @staticmethod
    def read(tensors: Mapping[str, Tensor]) -> Change:
        """Read a change from a saved state."""
        parts: dict[str, dict[str, Tensor]] = {"whole": {}, "left": {}, "right": {}}
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            parts[part][name] = value
        return Change(**parts)


class Copy:
    """A copy of a model whose weights are the model's weights plus a change."""

    def __init__(self, vit: Anatomy) -> None:
        self.vit = vit.copied(vit.dtype)
        net = self.vit.net
        self.weights = {name: value.detach() for name, value in net.named_parameters() if value.is_floating_point()}
        places = {name: name.rpartition(".") for name in self.weights}
        self._modules = {name: (net.get_submodule(where), leaf) for name, (where, _, leaf) in places.items()}

    def block_weights(self) -> set[str]:
        """The names of the weights inside the blocks."""
        inside = {id(p) for block in self.vit.blocks for p in block.parameters()}
        return {name for name, value in self.vit.net.named_parameters() if id(value) in inside}

    def used_weights(self, images: Tensor, read: Callable[[Anatomy, Tensor], Tensor]) -> dict[str, Tensor]:
        """The weights that the output of `read` depends on."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.weights.items()}
        with torch.enable_grad():
            out = read(self._put(leaves), images)
            gradients = torch.autograd.grad(out.float().square().sum(), list(leaves.values()), allow_unused=True)
        self._put(self.weights)
        return {name: self.weights[name] for name, g in zip(leaves, gradients, strict=True) if g is not None}

    def with_change(self, change: Change) -> Anatomy:
        """The copy with changed weights, which have gradients to the change."""
        changed = change.additions().items()
        return self._put({name: self.weights[name] + value.to(self.weights[name]) for name, value in changed})

    def _put(self, weights: Mapping[str, Tensor]) -> Anatomy:
        for name, value in weights.items():
            module, leaf = self._modules[name]
            module._parameters[leaf] = value
        return self.vit

    @torch.no_grad()
    def apply(self, change: Change) -> Anatomy:
        """Add the change to the weights permanently, and return the copy."""
        self._put({name: nn.Parameter(value, requires_grad=False) for name, value in self.weights.items()})
        for name, value in change.additions().items():
            self.weights[name] += value.to(self.weights[name])
        return self.vit


def read_logits(vit: Anatomy, images: Tensor) -> Tensor:
    return vit.readout(vit.run(vit.embed(images)))


def read_tokens(vit: Anatomy, images: Tensor) -> Tensor:
    return vit.run(vit.embed(images))


class Surrogate(nn.Module):
    """g(x, S): a changed copy of the model on the patches of a coalition."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, model: Copy, images: Tensor, z: Tensor, chunk: int) -> Tensor:
        """Logits [B,m,C] for coalitions z [B,m,d]."""
        return coalition_logits(model.with_change(self.change), images, z, chunk)


class ValueBlock(nn.Module):
    """Attention, then a norm and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return y


class Values(nn.Module):
    """phi(x) [B,d,C] before normalisation: the last tokens of a changed copy, a norm, a block, a norm, an MLP, tanh.

    Prefix tokens take part in the block's attention and are dropped after it.
    """

    def __init__(self, change: Change, width: int, heads: int, hidden: int, outcomes: int) -> None:
        super().__init__()
        self.change = change
        self.norm, self.block = nn.LayerNorm(width), ValueBlock(width, heads, hidden)
        last = nn.Linear(hidden, outcomes)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), last
        )

    def forward(self, model: Copy, images: Tensor) -> Tensor:
        backbone = model.with_change(self.change)
        return self.read(read_tokens(backbone, images), backbone.layout)

    def read(self, tokens: Tensor, layout: Layout) -> Tensor:
        """The same from the backbone's last tokens."""
        x = self.block(self.norm(tokens))
        phi: Tensor = self.mlp(layout.of_cells(x)).tanh()
        return phi


def normalise(phi: Tensor, total: Tensor) -> Tensor:
    """phi [B,d,C] plus a constant such that sum phi = total [B,C] = v(full) - v(empty)."""
    return phi + ((total - phi.sum(1)) / phi.shape[1])[:, None]


class Networks(nn.Module):
    """The surrogate, whose change is empty if it is the model itself, and the network of the values."""

    def __init__(self, surrogate: Surrogate, values: Values) -> None:
        super().__init__()
        self.surrogate, self.values = surrogate, values


class Joined:
    """An explainer joined with its model: the surrogate, the changed backbone, and v(empty) [C]."""

    def __init__(self, networks: Networks, vit: Anatomy) -> None:
        changes = networks.surrogate.change, networks.values.change
        self.surrogate = self.backbone = Copy(vit).apply(changes[0])
        if not (changes[0].empty and changes[1].empty):
            self.backbone = Copy(vit).apply(changes[1])
        self.values = copy.deepcopy(networks.values).to(vit.device, vit.dtype)
        self.empty = no_patches(self.surrogate)

    def __call__(self, images: Tensor) -> Tensor:
        """phi [B,d,C], in two forwards, or one if surrogate and backbone are the model itself."""
        tokens = read_tokens(self.backbone, images)
        same = self.surrogate is self.backbone
        logits = self.backbone.readout(tokens) if same else read_logits(self.surrogate, images)
        total = self.surrogate.probabilities(logits.to(self.empty)) - self.empty
        return normalise(self.values.read(tokens, self.backbone.layout).to(self.empty), total)


@torch.no_grad()
def no_patches(vit: Anatomy) -> Tensor:
    """v(empty) [C], which does not depend on the image."""
    blank = torch.zeros(1, *vit.input_shape, device=vit.device, dtype=vit.dtype)
    none = torch.zeros(1, 1, vit.cells, device=vit.device, dtype=torch.bool)
    return vit.probabilities(coalition_logits(vit, blank, none, 1)[0, 0])


class ViTShapley(Explainer[Networks]):
    """A trained ViT-Shapley explainer: the networks, the model they were trained for, and how they were trained."""

    kind, weights, title, format = "vit-shapley", "values", "ViT-Shapley", 1
    command, need, shipped = "shapley", ("a network", "it"), ZOO / "pocket-shapley"
    stored = torch.float16

    @staticmethod
    def why_not(vit: Anatomy) -> str | None:
        if vit.depth == 0 or vit.hierarchical:
            return f"{vit.name} has no plain grid of patch tokens through all its blocks"
        if vit.attention is not None:
            return f"the attention of {vit.name} cannot be masked: {vit.attention}"
        reason = vit.outputs.no_divergence(vit.classes)
        return no_coalitions(vit) if reason is None else f"{vit.name} has no output distribution to explain: {reason}"

    def options(self) -> dict[str, Any]:
        return {"heads": self.network.values.block.heads}

    @staticmethod
    def build(weights: dict[str, Tensor], options: dict[str, Any]) -> Networks:
        def part(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(name): value for key, value in weights.items() if key.startswith(name)}

        changes = [Change.read(part(f"{name}.change.")) for name in ("surrogate", "values")]
        hidden, width = weights["values.block.fc1.weight"].shape
        outcomes = len(weights["values.mlp.5.bias"])
        with torch.random.fork_rng(devices=[]):
            values = Values(changes[1], width, int(options["heads"]), hidden, outcomes)
        networks = Networks(Surrogate(changes[0]), values)
        networks.load_state_dict(weights)
        return networks

    def join(self, vit: Anatomy) -> Joined:
        """This explainer joined with a model; cached until the model's weights change."""
        return self.cached("joined", vit, lambda vit: Joined(self.network, vit))

    def surrogate(self, vit: Anatomy) -> Anatomy:
        """The surrogate as a model that can be explained and measured like any other."""
        return self.join(vit).surrogate

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.model["patch_grid"]))
        count = sum(p.numel() for p in self.network.parameters())
        return f"<ViT-Shapley for {self.model['name']}: {count:,} numbers, {grid} patches>"


load = ViTShapley.read

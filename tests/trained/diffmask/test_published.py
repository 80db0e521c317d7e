"""Checkpoints of the authors' code: files of their layout are imported, hostile ones refused, nothing is executed."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import types
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.trained.diffmask import import_gates
from patchlight.trained.diffmask.gates import observe
from tests.helpers import command
from tests.trained.toys import pictures, toy

GATES, WIDTH, MUL = 4, 16, 13.0


class TheirGate(nn.Module):
    """Two weight-normalised linear maps with tanh after both, stretched: the layout of one gate."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weight_norm is deprecated, and its names are the layout
            first, second = (
                nn.utils.weight_norm(nn.Linear(a, b)) for a, b in ((2 * WIDTH, WIDTH // 4), (WIDTH // 4, 1))
            )
        self.f = nn.Sequential(first, nn.Tanh(), second, nn.Tanh())
        self.add_activation = nn.Parameter(torch.tensor(1.5) + torch.rand(()))

    def forward(self, h0: Tensor, state: Tensor) -> Tensor:
        found: Tensor = self.f(torch.cat([h0, state], -1))[..., 0] * MUL + self.add_activation
        return found


class Theirs(nn.Module):
    """The whole module as it is saved, without the ViT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.gate = nn.Module()
        self.gate.g_hat = nn.ModuleList(TheirGate() for _ in range(GATES))
        self.gate.placeholder = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.alpha = nn.ParameterList(nn.Parameter(torch.tensor(20.0 + i)) for i in range(GATES))
        for name in ("running_acc", "running_l0", "running_steps"):
            self.register_buffer(name, torch.ones(GATES))

    def mask(self, h0: Tensor, states: list[Tensor]) -> Tensor:
        """exp of the sum of log P(z != 0), P = sigmoid(u - 0.2 log 0.2)."""
        u = torch.stack([gate(h0, state) for gate, state in zip(self.gate.g_hat, states, strict=True)])  # type: ignore[arg-type]
        return torch.sigmoid(u - 0.2 * torch.tensor(0.2).log()).log().sum(0).exp()


def checkpoint(state: dict[str, Tensor], **hyper: Any) -> dict[str, Any]:
    """A checkpoint of Lightning, whose hyper-parameters contain a class of another package."""
    adam = {"state": {0: {"step": 5, "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 2e-5, "params": [0]}]}
    return {
        "epoch": 24,
        "global_step": 100,
        "pytorch-lightning_version": "1.6.3",
        "state_dict": OrderedDict(state),
        "optimizer_states": [adam],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"alpha": 20.0, "mul_activation": MUL, "add_activation": 8.0, **hyper},
    }


def save(content: Any, path: Path) -> Path:
    """torch.save with a class of a package that does not exist when the file is read."""
    torch.save(content, path)
    return path


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object of a class in `pytorch_lightning.config`, a package that exists only for pickling."""
    package, module = types.ModuleType("pytorch_lightning"), types.ModuleType("pytorch_lightning.config")
    kind = type("Config", (), {"__module__": "pytorch_lightning.config"})
    module.Config = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    monkeypatch.setitem(sys.modules, "pytorch_lightning.config", module)
    thing: Any = kind()
    thing.hidden_size, thing.labels = WIDTH, {0: "a"}
    return thing


def test_imported_gates_compute_what_the_layout_computes(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vit, theirs, x = toy(), Theirs(), pictures(3)
    file = save(checkpoint(theirs.state_dict(), model_cfg=config), tmp_path / "theirs.ckpt")
    monkeypatch.delitem(sys.modules, "pytorch_lightning.config")
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    dm = import_gates(file, vit)
    assert "pytorch_lightning" not in sys.modules
    seen = observe(vit, x)
    with torch.no_grad():
        expected = theirs.mask(seen.h0, seen.states)
    found = pl.explain(vit, x, "diffmask", explainer=dm, map="keep").scores.flatten(1)
    assert torch.allclose(found, expected, atol=1e-5)
    assert float(expected.std()) > 0.01
    assert torch.equal(dm.gates.baseline, theirs.gate.placeholder.detach().flatten())  # type: ignore[union-attr, operator]
    assert dm.about["imported"] == {"file": "theirs.ckpt", "alpha": MUL, "multipliers": [20.0, 21.0, 22.0, 23.0]}
    again = pl.diffmask.load(dm.save(tmp_path / "dm"), vit)
    assert torch.equal(pl.explain(vit, x, "diffmask", explainer=again, map="keep").scores.flatten(1), found)


def test_tensors_alone_need_alpha(tmp_path: Path) -> None:
    vit, state = toy(), {k: v.contiguous() for k, v in Theirs().state_dict().items()}
    whole = import_gates(save(checkpoint(state), tmp_path / "a.ckpt"), vit).gates.state_dict()
    bare = save(state, tmp_path / "bare.pt")
    save_file(state, tmp_path / "b.safetensors")
    save_file(state, tmp_path / "c.safetensors", {"mul_activation": str(MUL)})
    for file in (bare, tmp_path / "b.safetensors"):
        with pytest.raises(PatchlightError, match=r"does not contain the scale of its gates .* give it as alpha"):
            import_gates(file, vit)
        assert import_gates(file, vit, 9.0).gates.alpha == 9
    same = import_gates(tmp_path / "c.safetensors", vit)
    assert same.gates.alpha == MUL
    assert all(torch.equal(value, same.gates.state_dict()[name]) for name, value in whole.items())
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(PatchlightError, match="scale of its gates"):
            import_gates(bare, vit, alpha)


class Bomb:
    """Unpickling it with pickle creates a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class Evaluated(Bomb):
    def __reduce__(self) -> Any:
        return eval, (f"__import__('os').mkdir({str(self.folder)!r})",)


class Written(Bomb):
    """A function of a package that a checkpoint may name, which would write a file."""

    def __reduce__(self) -> Any:
        return torch.save, (1, str(self.folder))


def rewritten(source: Path, target: Path, change: Callable[[bytes], bytes], **options: Any) -> Path:
    """A zip file with a changed pickle."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **options) as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, change(data) if info.filename.endswith("data.pkl") else data)
    return target


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return save(checkpoint(Theirs().state_dict()), tmp_path / "good.ckpt")


@pytest.mark.parametrize("kind", [Bomb, Evaluated])
def test_code_is_never_run(kind: type[Bomb], tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    hostile = checkpoint(Theirs().state_dict(), model_cfg=kind(marker))
    with pytest.raises(PatchlightError, match=r"is refused: it names \w+\.\w+, which a checkpoint of gates"):
        import_gates(save(hostile, tmp_path / "hostile.ckpt"), toy())
    assert not marker.exists()
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(hostile["hyper_parameters"], protocol=2))
    with pytest.raises(PatchlightError, match="is damaged or not a checkpoint"):
        import_gates(tmp_path / "plain.ckpt", toy())
    assert not marker.exists()
    torch.load(tmp_path / "hostile.ckpt", weights_only=False)  # the file would have done it
    assert marker.exists()


def test_a_harmless_package_runs_nothing_either(tmp_path: Path) -> None:
    marker = tmp_path / "written"
    file = save(checkpoint(Theirs().state_dict(), model_cfg=Written(marker)), tmp_path / "writes.ckpt")
    assert import_gates(file, toy()).gates.alpha == MUL
    assert not marker.exists()
    torch.load(file, weights_only=False)  # the file would have done it
    assert marker.exists()


def test_damaged_files_are_one_sentence(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    vit = toy()

    def refused(content: bytes, told: str, name: str = "x.ckpt") -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PatchlightError, match=told) as error:
            import_gates(tmp_path / name, vit)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400

    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        refused(data[: int(share * len(data))], "is damaged or not a checkpoint")
    refused(b"GIF89a" + bytes(500), "is damaged or not a checkpoint")
    refused(data[:500], "is damaged", "x.safetensors")
    for at in range(200, len(data), 997):  # a byte here and there: read, or one sentence
        spoilt = bytearray(data)
        spoilt[at] ^= 0xFF
        (tmp_path / "y.ckpt").write_bytes(spoilt)
        with contextlib.suppress(PatchlightError):
            import_gates(tmp_path / "y.ckpt", vit)
    with pytest.raises(PatchlightError, match="does not exist"):
        import_gates(tmp_path / "missing.ckpt", vit)


def test_other_shapes_and_missing_tensors_are_named(tmp_path: Path) -> None:
    state = Theirs().state_dict()

    def told(changes: dict[str, Tensor | None], vit: Any = None) -> str:
        new = {**state, **changes}
        file = save(checkpoint({k: v for k, v in new.items() if v is not None}), tmp_path / "x.ckpt")
        with pytest.raises(PatchlightError) as error:
            import_gates(file, toy() if vit is None else vit)
        return str(error.value)

    assert "needs 5 gates of width 16: it has 4 gates" in told({}, toy(depth=3))
    assert "'gate.g_hat.2.f.0.weight_v' is missing" in told({"gate.g_hat.2.f.0.weight_v": None})
    assert "'gate.placeholder' has shape [1, 1, 8], not [1, 1, 16]" in told({"gate.placeholder": torch.ones(1, 1, 8)})
    assert "it has no gates" in told(dict.fromkeys(state))
    assert "'gate.g_hat.0.f.0.bias' has values that are not finite" in told(
        {"gate.g_hat.0.f.0.bias": torch.full((4,), torch.nan)}
    )
    assert "'gate.g_hat.0.f.0.bias' is missing" in told({"gate.g_hat.0.f.0.bias": torch.ones(4, dtype=torch.long)})
    with pytest.raises(PatchlightError, match="does not contain a state_dict"):
        import_gates(save([1, 2], tmp_path / "list.ckpt"), toy())


HUGE = b"\x8a\x06" + (10**12).to_bytes(6, "little")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.replace(b"K\x04", HUGE), "is damaged"),  # a bias of four numbers
        (lambda data: bytes(17 * 2**20), "is damaged"),
        (lambda data: b"\x80\x02}r\xff\xff\xff\xff.", "does not contain the scale"),
        (lambda data: pickle.dumps({"state_dict": bytearray(8)}, protocol=5), "is damaged"),
    ],
)
def test_declared_sizes_that_are_not_there_are_refused_before_reading(
    change: Callable[[bytes], bytes], words: str, good: Path, tmp_path: Path
) -> None:
    with pytest.raises(PatchlightError, match=words):
        import_gates(rewritten(good, tmp_path / "x.ckpt", change), toy())


def test_records_that_are_compressed_or_too_long_are_refused(good: Path, tmp_path: Path) -> None:
    rewritten(good, tmp_path / "z.ckpt", lambda data: data, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(PatchlightError, match="compressed or declares"):
        import_gates(tmp_path / "z.ckpt", toy())
    raw = bytearray(good.read_bytes())
    entry = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"data/7"))  # of a gate, in the central directory
    raw[entry + 20 : entry + 28] = b"\xff\xff\xff\x7f" * 2
    (tmp_path / "claims.ckpt").write_bytes(raw)
    with pytest.raises(PatchlightError, match="compressed or declares 2147483647 bytes"):
        import_gates(tmp_path / "claims.ckpt", toy())


def test_the_command(good: Path, tmp_path: Path) -> None:
    state = {}
    vit = pl.load("pocket")
    gates = pl.diffmask.load(Path(pl.__file__).parent / "zoo" / "pocket-diffmask").gates
    ours = gates.state_dict()
    for i in range(gates.count):
        for theirs, mine in {"f.0": ("v1", "g1", "c1"), "f.2": ("v2", "g2", "c2")}.items():
            v, g, c = (ours[name][i] for name in mine)
            state |= {f"gate.g_hat.{i}.{theirs}.weight_v": v, f"gate.g_hat.{i}.{theirs}.weight_g": g}
            state[f"gate.g_hat.{i}.{theirs}.bias"] = c.flatten()
        state[f"gate.g_hat.{i}.add_activation"] = ours["beta"][i].clone()
    state["gate.placeholder"] = ours["baseline"].view(1, 1, -1)
    file = save(checkpoint(state, mul_activation=gates.alpha), tmp_path / "pocket.ckpt")
    words = ("diffmask", "import", str(file), "--model", "pocket", "--out", f"{tmp_path}/dm")
    command(*words, says=("imported from pocket.ckpt, alpha 15",))
    x = vit.batch(torch.rand(2, 3, 32, 32))
    first, second = (pl.explain(vit, x, "diffmask", **e).scores for e in ({}, {"explainer": str(tmp_path / "dm")}))
    assert torch.equal(first, second)
    words = ("diffmask", "import", str(good), "--out", f"{tmp_path}/no")
    command(*words, code=2, says=("does not fit pocket, which needs 11 gates",))
    assert not (tmp_path / "no").exists()


def test_pickles_of_random_opcodes_run_nothing(good: Path, tmp_path: Path) -> None:
    """Random bytes after a valid beginning."""
    chance = random.Random(0)
    valid = pickle.dumps({"state_dict": {}}, protocol=2)
    for n in range(60):
        data = valid[: n % 20 + 2] + chance.randbytes(80)
        with pytest.raises(PatchlightError):
            import_gates(rewritten(good, tmp_path / "random.ckpt", lambda _, data=data: data), toy())

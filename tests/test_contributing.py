"""Every example of CONTRIBUTING.md, loaded as the file of somebody else, is a thing like any other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import patchlight as pl
from patchlight.anatomy.families import FAMILIES
from patchlight.cli import app
from patchlight.methods.base import METHODS
from patchlight.testing import check_method, check_metric, contract_names
from tests.families import images, shared
from tests.registries import restored

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python ([\w-]+)\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def plugin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The example of that name in a file, loaded; what it registered is taken out again."""
    file = tmp_path / "mine.py"
    file.write_text(EXAMPLES[request.param], encoding="utf-8")
    with restored():
        pl.load_plugin(file)
        pl.load_plugin(file)  # once is enough
        yield file


def test_there_is_an_example_of_everything() -> None:
    expected = {"layer-map", "own-passes", "ablates", "metric", "rule", "composition", "family", "data"}
    assert set(EXAMPLES) == expected
    assert "```python\n" not in TEXT, "an example has no name, so that no test runs it"


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


METHOD_EXAMPLES = [
    pytest.param("layer-map", "positive-gradient"),
    pytest.param("own-passes", "mirrored-gradient"),
    pytest.param("ablates", "patch-alone"),
]


@pytest.mark.parametrize(("plugin", "name"), METHOD_EXAMPLES, indirect=["plugin"])
def test_a_method_appears_everywhere(plugin: Path, name: str) -> None:
    assert name in [m.name for m in pl.list_methods()]
    assert name in contract_names()
    assert name in [m["name"] for m in json.loads(run("methods", "--json", "--plugin", plugin))]
    vit = shared("vit")
    check_method(name, vit, images(vit, 2), shared("vit", torch.float64))


@pytest.mark.parametrize("plugin", ["layer-map"], indirect=True)
def test_a_layer_map(plugin: Path) -> None:
    vit = shared("vit", torch.float64)
    with pl.trace(vit, images(vit)) as t:
        literal = (t.attention[-1] * t.attention_gradients[-1].relu()).mean(1)[:, 0]
    att = pl.explain(vit, images(vit), "positive-gradient")
    torch.testing.assert_close(att.scores, vit.patches(literal).float())
    maps = pl.explain(vit, images(vit), ["positive-gradient.plus.libra", "positive-gradient.rollout"])
    assert all(bool(torch.isfinite(m.scores).all()) for m in maps.values())
    assert pl.explain(vit, images(vit), "positive-gradient", power=2).settings["power"] == 2


@pytest.mark.parametrize("plugin", ["ablates"], indirect=True)
def test_variants(plugin: Path) -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 2)
    scores = pl.explain(vit, batch, "patch-alone", 1).scores
    alone = vit.readout(vit.run(vit.embed(batch), keep=torch.tensor([[5], [5]])))
    torch.testing.assert_close(scores.flatten(1)[:, 5], alone.softmax(1)[:, 1].float())


@pytest.mark.parametrize("plugin", ["metric"], indirect=True)
def test_a_metric(plugin: Path) -> None:
    assert "top-patches" in [m["name"] for m in json.loads(run("metrics", "--json", "--plugin", plugin))]
    vit = shared("vit", torch.float64)
    batch = images(vit, 3)
    every = vit.grid[0] * vit.grid[1]
    result = pl.evaluate(vit, batch, torch.rand(3, *vit.grid), "top-patches", target=2, count=every)
    torch.testing.assert_close(result.values, vit.logits(batch).softmax(1)[:, 2].double())
    assert check_metric("top-patches", shared("vit"), batch.float(), vit) is not None


@pytest.mark.parametrize("plugin", ["rule"], indirect=True)
def test_a_rule(plugin: Path) -> None:
    vit = shared("vit", torch.float64)
    maps = pl.explain(vit, images(vit), ["ixg", "ixg.frozen-attention", "ixg.conservative"])
    plain, own, both = (m.scores for m in maps.values())
    assert not torch.allclose(plain, own)
    assert not torch.allclose(own, both)


@pytest.mark.parametrize("plugin", ["composition"], indirect=True)
def test_a_composition(plugin: Path) -> None:
    vit = shared("vit", torch.float64)
    maps = pl.explain(vit, images(vit), {str(k): {"method": "ixg.libra", "start": k} for k in range(vit.depth)})
    literal = torch.stack([m.scores for m in maps.values()])
    torch.testing.assert_close(pl.explain(vit, images(vit), "ixg.strongest.libra").scores, literal.amax(0))
    later = pl.explain(vit, images(vit), "ixg.strongest.libra", start=1).scores
    torch.testing.assert_close(later, literal[1:].amax(0))


@pytest.mark.parametrize("plugin", ["family"], indirect=True)
def test_a_family(plugin: Path) -> None:
    read = FAMILIES["pebble"].function
    torch.manual_seed(0)
    model = read.__globals__["Pebble"]().eval()
    vit = pl.wrap(model)
    assert vit.library == "pebble"
    loaded = pl.load("pebble:deep", pretrained=False)
    assert (loaded.library, loaded.depth) == ("pebble", 6)
    batch = torch.randn(2, 3, 32, 32)
    check_method("genatt", vit, batch)
    check_method("ixg.plus.libra", vit, batch)


@pytest.mark.parametrize("plugin", ["data"], indirect=True)
def test_a_kind_of_data(plugin: Path, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 40)).save(tmp_path / name)
    (tmp_path / "images.txt").write_text("a.png cat\nb.png dog\n")
    data = pl.open_data("listed", tmp_path)
    assert [sample.label for sample in data] == [0, 1]
    with pytest.raises(pl.PatchlightError, match="data set 'listed' has no option 'fill'; did you mean 'file'"):
        pl.open_data("listed", tmp_path, fill="x")


def test_a_plugin_works_in_a_recipe(tmp_path: Path) -> None:
    file, recipe = tmp_path / "mine.py", tmp_path / "r.toml"
    file.write_text(EXAMPLES["layer-map"] + EXAMPLES["metric"], encoding="utf-8")
    photos = Path(pl.__file__).parent / "zoo" / "photos"
    recipe.write_text(
        f'name = "mine"\n[models]\nPocket = "pocket"\n[data]\nkind = "folder"\npath = "{photos}"\nimages = 2\n'
        '[methods]\nMine = "positive-gradient.plus"\n[metrics]\nTop = {metric = "top-patches", count = 8}\n'
    )
    code = "from patchlight.cli import main; main()"
    words = ["bench", "run", str(recipe), "--out", str(tmp_path / "out"), "--plugin", str(file)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Table: patchlight bench report" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [("1 / 0\n", "ZeroDivisionError: division by zero"), ("import patchlight\npatchlight.nothing\n", "nothing")],
)
def test_a_broken_plugin_gives_a_clear_error(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    done = CliRunner().invoke(app, ["methods", "--plugin", str(file)])
    assert done.exit_code == 2
    assert words in done.stderr
    assert "broken.py' could not be loaded" in done.stderr
    assert CliRunner().invoke(app, ["methods", "--plugin", str(tmp_path / "none.py")]).exit_code == 2


def test_a_plugin_that_failed_can_be_loaded_again_after_a_fix(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(EXAMPLES["layer-map"] + "nothing\n", encoding="utf-8")
    with pytest.raises(pl.PatchlightError, match="name 'nothing' is not defined"):
        pl.load_plugin(file)
    file.write_text(EXAMPLES["layer-map"].replace("power: float = 1.0", "power: float = 2.5"), encoding="utf-8")
    try:
        pl.load_plugin(file)
        assert METHODS["positive-gradient"].settings(pl.LAST)["power"].default == 2.5
    finally:
        METHODS.remove("positive-gradient")


def test_a_layer_map_cannot_read_what_it_did_not_declare() -> None:
    @pl.layer_map("greedy", paper="none", needs={"A"}, combine=pl.LAST, matrix=True)
    def greedy(b: pl.Evidence) -> torch.Tensor:
        """Reads more than it says."""
        return (b.A * b.G).mean(1)

    vit = shared("vit")
    try:
        for request in ("greedy", ["genatt", "greedy"]):  # alone, and with a method that records G
            with pytest.raises(pl.PatchlightError, match=r"`greedy` reads G but declares needs=\{'A'\}"):
                pl.explain(vit, images(vit), request)
    finally:
        METHODS.remove("greedy")


def test_an_installed_plugin_is_loaded_automatically(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EXAMPLES["layer-map"], encoding="utf-8")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[patchlight.plugins]\nmine = mine\nbroken = nowhere_at_all\n")
    code = "import patchlight as pl; print('positive-gradient' in [m.name for m in pl.list_methods()])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr
    assert "plugin 'broken' could not be loaded" in done.stderr

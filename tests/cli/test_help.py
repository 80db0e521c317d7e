"""Help, words and defaults of every command: plain types, panels, examples that parse, one meaning per word."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import patchlight as pl
from patchlight import cli
from patchlight.cli import options
from patchlight.cli.common import escape, name_flags
from patchlight.study.recommend.record import FILE
from tests.cli.test_cli import folder as folder
from tests.cli.test_cli import refused, run
from tests.cli.test_cli import tiny as tiny
from tests.core.test_images import noise

HOSTILE = "a\x1b]0;title\x07\r\n\u202egpj.png"


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("width", ["80", "120"])
def test_help_is_plain_and_has_examples_that_parse(words: tuple[str, ...], width: str) -> None:
    shown = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": width, "TERMINAL_WIDTH": width}).stdout
    odd = ("<bool>", "<list", "<path>", "<str>", "<int>", "{", "[[")
    assert not [word for word in odd if word in shown.replace("{}", "")], "the prompt template has {}"
    assert "─ Options ─" not in shown, "every option is in one of the four panels"
    examples = [line.strip() for line in shown.partition("Examples:")[2].splitlines() if line.strip()]
    assert len(examples) == (6 if words == ("explain",) else 2), "explain has one for each kind of question"
    for example in examples:
        program, *rest = shlex.split(example.partition(" > ")[0])
        assert program == "patchlight"
        assert tuple(rest[: len(words)]) == words
        COMMANDS[words].make_context(" ".join(words), rest[len(words) :])


@pytest.mark.parametrize("words", [(), ("bench",), ("diffmask",), ("shapley",)], ids=" ".join)
def test_help_of_groups_is_plain(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli.app, [*words, "--help"]).stdout
    assert "<bool>" not in shown
    assert "--help" in shown


def test_a_word_has_one_meaning() -> None:
    """`--method`, `--metric`, `--images` and `--limit` are the only words for what they mean."""
    for words, command in COMMANDS.items():
        flags = {flag for one in command.params for flag in one.opts if flag.startswith("--")}
        assert not flags & {"--methods", "--metrics", "--count", "--image-list", "--number", "--n"}, words
        kinds = {one.name: one.metavar for one in command.params if one.param_type_name == "option"}
        assert kinds.get("images", "PATH") == "PATH", words
        assert kinds.get("limit", "N") == "N", words
    used = {one.name for command in COMMANDS.values() for one in command.params if one.param_type_name == "option"}
    assert {name for panel in options.OPTIONS.values() for name in panel} == used - {"help"}


def test_words_of_earlier_versions_still_work_with_a_warning(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["recommend", "--images", str(tmp_path), "--methods=genat", "--metrics", "srg"])
    assert "warning: --methods is now --method; the old word will be removed" in done.stderr
    assert "did you mean 'genatt'" in done.stderr
    done = CliRunner().invoke(
        cli.app, ["bench", "report", str(tmp_path), "--latex", "--html", "x.html", "--against", "a"]
    )
    assert "--latex is now --format latex" in done.stderr
    assert "--baseline adds a table" in done.stderr
    done = CliRunner().invoke(cli.app, ["explain", "photo.jpg", "--count", "3"])
    assert "--limit" not in done.stderr, "explain has neither"
    words = ["bench", "plan", "tis-table-1", "--data", "cifar10:there"]
    assert "write --images there --data cifar10" in CliRunner().invoke(cli.app, words).stderr


@pytest.mark.usefixtures("tiny")
def test_auto_is_the_default_and_is_named(folder: Path) -> None:
    shown = run("explain", "photos/a.jpg").stdout
    assert "Explained by auto (fullgrad-plus.libra)." in shown
    found = json.loads(run("explain", "photos/a.jpg", "--force", "--json").stdout)
    assert found["used"] == {"auto": "fullgrad-plus.libra"}
    assert found["ignores_class"] == []
    quick = ("--metric", "deletion", "--set", "deletion.steps=2")
    assert "auto (fullgrad-plus.libra)" in run("evaluate", "--images", "photos", *quick).stdout
    found = json.loads(run("evaluate", "--images", "photos", *quick, "--json").stdout)
    assert found["used"] == {"auto": "fullgrad-plus.libra"}
    run("explain", "photos", "--method", "auto,rollout", "--save", "maps", "--out", "pictures")
    shown = run("evaluate", "maps", "--images", "photos", "--metric", "sparseness").stdout
    assert "auto (fullgrad-plus.libra)" in shown
    assert "rollout (ignores the class)" in shown


@pytest.mark.usefixtures("tiny")
def test_a_method_that_ignores_the_class_says_so(folder: Path) -> None:
    arguments = ("explain", "photos/a.jpg", "--method", "rollout,genatt,random", "--target", "dog", "--force")
    assert "rollout (ignores the class), genatt, random." in run(*arguments).stdout
    assert json.loads(run(*arguments, "--json").stdout)["ignores_class"] == ["rollout"]
    assert "ignores the class" in refused(*arguments, "--against", "cat")


def test_best_is_posterior(tiny: pl.Anatomy, folder: Path) -> None:
    found = json.loads(run("explain", "photos/a.jpg", "--method", "best", "--set", "samples=8", "--json").stdout)
    assert found["used"] == {"best": "posterior"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("explain photos/a.jpg --method genat", "did you mean 'genatt'"),
        ("explain photos/a.jpg --set strat=1 --method rollout", "did you mean 'start'"),
        ("explain photos/a.jpg --target dgo", "did you mean 'dog'"),
        ("explain photos/a.jpg --target dgo --labels names.txt", "no class is called 'dgo'"),
        ("explain photos/a.jpg --against dog", "--against needs --target"),
        ("explain photos/a.jpg --weights none.safetensors", "no file at 'none.safetensors' (--weights)"),
        ("explain photos/a.jpg --labels none.txt", "no file at 'none.txt' (--labels)"),
        ("explain photos/a.jpg --preprocess none.json", "no preprocessing at 'none.json'"),
        ("explain photos/a.jpg --explainer none --method diffmask", "no folder at 'none' (--explainer)"),
        ("explain photos/a.jpg", "already exists"),
        ("evaluate --images photos --csv values.csv --metric delettion", "did you mean 'deletion'"),
        ("evaluate --images photos --csv values.csv --target dgo", "did you mean 'dog'"),
        ("evaluate --images photos --csv values.csv --data imagenett", "no data set is called 'imagenett'"),
        ("evaluate none --images photos", "no folder of maps at 'none'"),
        ("evaluate --images photos --csv values.csv", "already exists"),
        ("recommend --images photos --method genat", "did you mean 'genatt'"),
        ("recommend --images photos --metric srgg", "did you mean 'srg'"),
        ("recommend --images photos --resume", "--resume needs the folder of an earlier run; give it as --out"),
        ("recommend --images photos --out verdict --method genat", "did you mean 'genatt'"),
        ("recommend --images photos --out verdict", "resume them (--resume) or choose another folder"),
        ("figure skipplus-2 --images photos --out figure.pdf --set shwon=1", "no setting 'shwon'"),
        ("figure skipplus-2 --images photos --out figure.pdf --target dgo", "did you mean 'dog'"),
        ("figure skipplus-2 --images photos --out figure.pdf", "already exists"),
        ("diffmask import none.ckpt --out gates", "no file at 'none.ckpt'"),
        ("diffmask train --images none --data cifar11 --out gates", "no data set is called 'cifar11'"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    arguments: str, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output that already exists is in the way of every request, and hides no other mistake."""

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("patchlight.anatomy.load.load", load)
    for existing in ("a-explained.png", "values.csv", "figure.pdf"):
        Path(existing).write_text("")
    Path("names.txt").write_text("cat\ndog\n")
    Path("verdict").mkdir()
    Path("verdict", FILE).write_text('{"header": {}}\n')
    assert sentence in refused(*arguments.split())


def test_an_unknown_model_is_not_hidden_by_existing_output(folder: Path) -> None:
    Path("a-explained.png").write_text("")
    assert "did you mean" in refused("explain", "photos/a.jpg", "--model", "deit_tiny_patch61_224")


@pytest.mark.usefixtures("tiny")
def test_serve_says_at_once_that_it_loads_and_opens_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    opened: list[str] = []

    class Server:
        url = "http://127.0.0.1:1/"

        def __init__(self, *_: Any) -> None: ...

        def run(self) -> None:
            wait_until(lambda: bool(opened))

    monkeypatch.setattr("patchlight.web.serve.Server", Server)
    monkeypatch.setattr("webbrowser.open", opened.append)
    first, last = run("serve", "--open").stderr.splitlines()
    assert first == "Loading pocket …"
    assert "is ready at http://127.0.0.1:1/" in last
    assert opened == [Server.url]


def wait_until(done: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)


def test_errors_name_flags() -> None:
    names = ["target", "score", "out", "batch_size"]
    assert name_flags("give target=… or score='logit'", names) == "give --target or --score logit"
    assert name_flags("give it as out=", names) == "give it as --out"
    assert (
        name_flags("batch_size=4 is fine, level='pixel' works", names) == "--batch-size 4 is fine, level='pixel' works"
    )
    assert name_flags("'--set start=x', my_target=3", names) == "'--set start=x', my_target=3"


@pytest.mark.usefixtures("tiny")
def test_names_cannot_steer_the_terminal(folder: Path, tiny: pl.Anatomy) -> None:
    """File names and labels with control and bidirectional characters are escaped wherever they are printed."""
    (folder / "odd").mkdir()
    noise(40, 40).save(folder / "odd" / HOSTILE)
    (folder / "odd" / f"broken{HOSTILE}").write_bytes(b"not an image")
    tiny.labels = [f"{HOSTILE}{i}" for i in range(7)]
    unsafe = {*"\x1b\x07\r\u202e"}
    for extra in ((), ("--json",)):
        done = run("explain", "odd", "--out", "pictures", "--force", *extra, code=3)
        assert not unsafe & set(done.output)
        assert "u202egpj.png" in done.output
    assert "\\x1b]0;title\\x07\\r\\n\\u202egpj.png" in done.stderr
    assert json.loads(done.stdout)["images"][0]["path"] == f"odd/{HOSTILE}"
    quick = ("--metric", "sparseness", "--method", "genatt")
    done = run("evaluate", "--images", "odd", *quick, code=3)
    assert not unsafe & set(done.output)
    sentence = refused("explain", f"none{HOSTILE}")
    assert not unsafe & set(sentence)


def test_escaped_text_keeps_other_languages() -> None:
    assert escape("café 猫 👩\u200d💻") == "café 猫 👩\u200d💻"
    assert escape("one\ntwo", keep="\n") == "one\ntwo"
    assert escape("b\udcff.png") == "b\\xff.png"

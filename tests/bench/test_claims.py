"""Claims: a unit has one owner, a dead owner's is taken over once, and nobody's clock is believed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from patchlight.bench import claims as room
from patchlight.bench.claims import Claims, Owner


def stranger(folder: Path, name: str = "stranger", **about: object) -> Owner:
    """An owner on another machine, as its file says."""
    one = replace(Owner(name, "elsewhere", "another machine", 1, "1"), **about)  # type: ignore[arg-type]
    (folder / "owners").mkdir(parents=True, exist_ok=True)
    (folder / "owners" / f"{name}.json").write_text(json.dumps(asdict(one)))
    return one


def claimed(folder: Path, key: str, owner: str, number: int = 0) -> None:
    (folder / "claims").mkdir(parents=True, exist_ok=True)
    (folder / "claims" / f"{key}.{number}").write_text(owner)


def test_of_many_that_ask_at_once_one_gets_it(tmp_path: Path) -> None:
    crew = [Claims(tmp_path) for _ in range(32)]
    start = threading.Barrier(len(crew))
    found: list[str] = []

    def ask(claims: Claims) -> None:
        with claims.present():
            start.wait()
            found.extend(claims.take(f"unit{i}").state for i in range(20))
            start.wait()

    threads = [threading.Thread(target=ask, args=(claims,)) for claims in crew]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count("mine") == 20
    assert found.count("taken") == 20 * 31


def test_a_process_of_this_machine_that_is_gone_is_dead_at_once(tmp_path: Path) -> None:
    own = Claims(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    stranger(tmp_path, machine=own.own.machine, pid=child.pid, began=room._began(child.pid))
    with own.present():
        claimed(tmp_path, "unit", "stranger")
        assert not own.alone
        assert own.take("unit").state == "taken"
        child.kill()
        child.wait()
        assert own.take("unit") == ("mine", 1, 1)
        assert not own.others()


def test_the_number_of_a_process_that_is_another_now_is_no_sign_of_life(tmp_path: Path) -> None:
    own = Claims(tmp_path)
    stranger(tmp_path, machine=own.own.machine, pid=os.getpid(), began="long ago")
    with own.present():
        assert own.alone


def test_an_owner_elsewhere_is_dead_when_its_beat_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EXPIRY", 0.3)
    own = Claims(tmp_path)
    with own.present():
        stranger(tmp_path)
        claimed(tmp_path, "unit", "stranger")
        for beat in range(6):
            stranger(tmp_path, beat=beat)
            assert own.take("unit").state == "taken"
            time.sleep(0.1)
        time.sleep(0.4)
        assert own.take("unit") == ("mine", 1, 1)


def test_a_clock_that_is_an_hour_off_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Claims(tmp_path)
    with own.present():
        for hours in (-1, 1):
            name = f"stranger{hours}"
            stranger(tmp_path, name)
            claimed(tmp_path, name, name)
            for path in (tmp_path / "owners" / f"{name}.json", tmp_path / "claims" / f"{name}.0"):
                os.utime(path, (time.time() + hours * 3600,) * 2)
            monkeypatch.setattr(time, "time", lambda hours=hours: 1.8e9 + hours * 3600)
            assert own.take(name).state == "taken"
        assert len(own.others()) == 2


def test_who_takes_over_is_one_of_many(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    found: list[tuple[str, int, int]] = []

    def ask(claims: Claims) -> None:
        with claims.present():
            start.wait()
            found.append(claims.take("unit"))
            start.wait()

    threads = [threading.Thread(target=ask, args=(Claims(tmp_path),)) for _ in range(8)]
    with Claims(tmp_path).present():
        stranger(tmp_path, gone=True)
        claimed(tmp_path, "unit", "stranger")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [("mine", 1, 0), *[("taken", 1, 0)] * 7]


def test_of_those_that_come_at_once_one_plans_first(tmp_path: Path) -> None:
    crew = sorted((Claims(tmp_path) for _ in range(4)), key=lambda claims: claims.own.id)
    with contextlib.ExitStack() as stack:
        for claims in reversed(crew):
            stack.enter_context(claims.present())
        assert [claims.alone for claims in crew] == [False, False, False, True]
        assert [claims.my_turn() for claims in crew] == [False, False, False, True]
        crew[-1].tell(ready=True)
        assert all(claims.my_turn() for claims in crew)
        crew[-1].tell(gone=True)
        assert [claims.my_turn() for claims in crew[:3]] == [True, False, False]


def test_what_is_done_is_done_whoever_did_it(tmp_path: Path) -> None:
    first, second = Claims(tmp_path), Claims(tmp_path)
    with second.present():
        with first.present():
            claim = first.take("unit")
            first.finish("unit", claim)
        assert second.take("unit").state == "done"


def test_deaths_are_counted_and_goodbyes_are_not(tmp_path: Path) -> None:
    own = Claims(tmp_path)
    machine = own.own.machine
    with own.present():
        for number, about in enumerate(({"gone": True}, {"pid": 0}, {"pid": 0}, {"gone": True})):
            stranger(tmp_path, f"owner{number}", machine=machine, **about)
            claimed(tmp_path, "unit", f"owner{number}", number)
        assert own.take("unit") == ("mine", 4, 2)


def test_a_claim_that_is_being_made_is_somebodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EXPIRY", 0.2)
    own = Claims(tmp_path)
    with own.present():
        claimed(tmp_path, "unit", "")
        assert own.take("unit").state == "taken"
        time.sleep(0.3)
        assert own.take("unit").state == "mine"


def test_whoever_comes_alone_clears_away_what_others_left(tmp_path: Path) -> None:
    stranger(tmp_path, gone=True)
    claimed(tmp_path, "unit", "stranger")
    own = Claims(tmp_path)
    with own.present():
        assert own.alone
        assert own.take("unit") == ("mine", 0, 0)
        assert [path.stem for path in (tmp_path / "owners").iterdir()] == [own.own.id]


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BEAT", 0.02)
    own = Claims(tmp_path)
    path = tmp_path / "owners" / f"{own.own.id}.json"
    with own.present():
        until = time.monotonic() + 60
        while json.loads(path.read_text())["beat"] < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert json.loads(path.read_text())["gone"]


def test_an_owner_that_died_elsewhere_holds_a_folder_for_a_minute_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "EXPIRY", 0.3)
    stranger(tmp_path)
    own = Claims(tmp_path)
    with own.present():
        assert (own.settled(), own.alone) == (False, False), "it may be alive"
        time.sleep(0.4)
        assert (own.settled(), own.alone) == (True, True)
        assert [path.stem for path in (tmp_path / "owners").iterdir()] == [own.own.id]


def test_an_owner_elsewhere_whose_heart_beats_is_believed(tmp_path: Path) -> None:
    stranger(tmp_path)
    own = Claims(tmp_path)
    with own.present():
        assert not own.settled()
        stranger(tmp_path, beat=1)
        assert (own.settled(), own.alone) == (True, False)


def test_who_has_left_is_gone_though_its_process_lives(tmp_path: Path) -> None:
    first, second = Claims(tmp_path), Claims(tmp_path)
    with second.present():
        with first.present():
            assert first.take("unit").state == "mine"
        stranger(tmp_path, first.own.id, **{**vars(first.own), "gone": False, "id": first.own.id})
        assert second.take("unit") == ("mine", 1, 1), "it could not say goodbye"

"""Bits that flip in a store: told with the file, never used, and mended by the next run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from patchlight.bench.html import as_html
from patchlight.bench.local import run
from patchlight.bench.recipe import override
from patchlight.bench.store import Results, Store
from patchlight.bench.tables import as_csv, as_markdown, read_tables
from patchlight.core.errors import PatchlightError
from tests.bench.small import pictures, recipe


def made(folder: Path, images: int = 4) -> Path:
    run(override(recipe(pictures(folder / "images", images)), images=images), folder / "run")
    return folder / "run"


def flip(path: Path, chance: random.Random) -> bytes:
    """Turn one bit of a file; what was in it."""
    before = path.read_bytes()
    data = bytearray(before)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))
    return before


def curves_of(store: Store) -> dict[tuple[str, str, str], Tensor]:
    found = {key: store.curves(*key) for key in store.results().columns}
    return {key: own for key, own in found.items() if own is not None}


def same(store: Store, found: Results, whole: Results, drawn: dict[tuple[str, str, str], Tensor]) -> None:
    """Assert that what is there is what was measured."""
    for key, column in found.columns.items():
        expected = whole.columns[key]
        there = ~column.values.isnan()
        assert int((~there).sum()) == column.undone, key
        assert torch.equal(column.values[there], expected.values[there]), key
        if bool(there.any()):
            curves = store.curves(*key)
            assert curves is not None
            assert torch.equal(curves[there], drawn[key][there]), key
            assert column.x is not None
            assert expected.x is not None
            assert torch.equal(column.x, expected.x)
        assert (column.bounds, column.higher_is_better) == (expected.bounds, expected.higher_is_better)
        assert column.errors.to_pylist() == expected.errors.to_pylist()


def flipped(out: Path, flips: int, pages: int = 2) -> None:
    """Flip bits all over a store, one at a time, and assert that each is told and none is used."""
    whole, drawn = Store(out).results(), curves_of(Store(out))
    kept = ("manifest.json", "*/*.parquet", "*/*.safetensors")
    files = sorted(path for pattern in kept for path in out.glob(pattern))
    chance = random.Random(flips)
    for i in range(flips):
        path = chance.choice(files)
        before = flip(path, chance)
        told = ""
        try:
            tables = read_tables(out)
            same(tables.store, tables.results, whole, drawn)
            told = " ".join(tables.notes)
            as_csv(tables), as_markdown(tables)
            if i < pages:
                as_html(tables)
        except PatchlightError as error:
            told = str(error)
        assert path.name in told, f"{path.name} is damaged, and nobody is told"
        path.write_bytes(before)


def mended(out: Path, images: Path, times: int) -> None:
    """Flip a bit, run again, and assert that all is as it was."""
    whole, drawn = Store(out).results(), curves_of(Store(out))
    chance = random.Random(times)
    for _ in range(times):
        path = chance.choice(sorted(p for p in out.glob("*/*") if p.suffix in (".parquet", ".safetensors")))
        flip(path, chance)
        summary = run(recipe(images), out)
        assert 0 < summary.before < summary.values
        assert any(path.name in note and "is damaged" in note for note in summary.notes)
        found = Store(out).results()
        assert found.images == whole.images
        same(Store(out), found, whole, drawn)
        assert not any(column.undone for column in found.columns.values())


@pytest.mark.parametrize(("flips", "mends"), [(60, 3), pytest.param(600, 20, marks=pytest.mark.slow)])
def test_flipped_bits_are_reported_and_mended(tmp_path: Path, flips: int, mends: int) -> None:
    out = made(tmp_path)
    flipped(out, flips)
    mended(out, tmp_path / "images", mends)


def test_a_damaged_manifest_is_refused_and_the_rows_survive_it(tmp_path: Path) -> None:
    out = made(tmp_path, 2)
    changed = (out / "manifest.json").read_bytes().replace(b"GenAtt", b"GenAte")
    odd = [b"", b"[]", b"{}", b"null", b'{"format": true}', b"\xff\xfe", b"[" * 100_000]
    for text in (*odd, changed):
        (out / "manifest.json").write_bytes(text)
        for doing in (lambda: read_tables(out), lambda: run(recipe(tmp_path / "images"), out)):
            with pytest.raises(PatchlightError, match=r"'[^']*manifest\.json' is damaged; delete it"):
                doing()
    (out / "manifest.json").unlink()
    assert run(recipe(tmp_path / "images"), out).before == 16


def test_one_model_under_two_labels_has_rows_of_both(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    images = pictures(tmp_path / "images", 2)
    one = recipe(images)
    two = one.model_copy(update={"models": {"A": one.models["Pocket"], "B": one.models["Pocket"]}, "published": {}})
    run(two, tmp_path / "run")
    rows = pq.read_table(tmp_path / "run" / "units").to_pylist()
    assert len({(r["model"], r["image"], r["method"], r["metric"]) for r in rows}) == len(rows) == 2 * 2 * 4 * 2


def test_a_renamed_unit_is_noted_and_measured_again(tmp_path: Path) -> None:
    out = made(tmp_path)
    store, whole = Store(out), Store(out).results()
    first, second, *_ = sorted((out / "units").iterdir())
    renamed = first.rename(first.with_name(f"{second.name.rpartition('-')[0]}-{first.stem.rpartition('-')[2]}.parquet"))
    second.unlink()
    summary = run(override(recipe(tmp_path / "images"), images=4), out)
    note = f"'units/{renamed.name}' does not contain the unit of its name; it is measured again"
    assert [words for words in summary.notes if "unit of its name" in words] == [note]
    assert summary.now > 0
    assert not renamed.exists()
    found = store.results()
    assert found.done == whole.done
    assert all(torch.equal(found.columns[key].values, own.values) for key, own in whole.columns.items())
    assert run(override(recipe(tmp_path / "images"), images=4), out).notes == ()

"""Evidence: what a layer map declares is what it reads, and each quantity is made once."""

from __future__ import annotations

import pytest
import torch

import patchlight as pl
from patchlight.evidence.record import BACKWARD, PARTS, EndBias, Evidence, Record

X = torch.arange(12.0).view(1, 3, 4)
A = torch.rand(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
G = torch.rand(1, 2, 3, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_is_read_by_its_letter_where_it_is_declared(part: str) -> None:
    value = torch.full((2, 2), 3.0)
    record = Record(0, X)
    record.seen[part] = value
    assert getattr(Evidence(record, {part}), part) is value
    other = "A" if part != "A" else "G"
    with pytest.raises(pl.PatchlightError) as told:
        getattr(Evidence(record, {other}, "mine"), part)
    assert str(told.value) == f"`mine` reads {part} but declares needs={{'{other}'}}; add '{part}' to needs"


def test_what_is_declared_and_not_there_is_reported() -> None:
    with pytest.raises(pl.Unsupported, match="`mine` reads u, and block 3 of this model does not expose it"):
        Evidence(Record(3, X), {"u"}, "mine").u  # noqa: B018


def test_derived_quantities_need_what_they_are_made_of() -> None:
    made = Evidence.of(X, A=A, G=G)
    torch.testing.assert_close(made.AG, A * G)
    torch.testing.assert_close(made.heads_mean, (A[:, 0] + A[:, 1]) / 2)
    with pytest.raises(pl.PatchlightError, match=r"reads G but declares needs=\{'A', 'x'\}"):
        Evidence.of(X, A=A).AG  # noqa: B018


def test_a_shared_quantity_is_made_once_a_class() -> None:
    record, made = Record(0, X), []

    def compute() -> torch.Tensor:
        made.append(len(made))
        return X * len(made)

    for reader in ("one", "another"):
        torch.testing.assert_close(Evidence(record, {"x"}, reader).once("twice", compute), X)
    assert made == [0]
    record.forget()
    torch.testing.assert_close(Evidence(record).once("twice", compute), 2 * X)


def test_a_backward_is_forgotten_and_a_forward_is_not() -> None:
    record = Record(0, X, seen=dict.fromkeys(PARTS, X))
    record.add_bias(torch.ones(1))
    record.forget()
    assert set(record.seen) == PARTS - BACKWARD
    assert record.end() == EndBias()


def test_gradients_that_never_came_are_zero() -> None:
    record = Record(0, X, seen={"A": A, "n": X})
    record.complete()
    assert {name: tuple(record.seen[name].shape) for name in ("gy", "gn", "G", "bias")} == {
        "gy": (1, 3, 4),
        "gn": (1, 3, 4),
        "G": (1, 2, 3, 3),
        "bias": (1, 3),
    }
    assert not any(record.seen[name].any() for name in ("gy", "gn", "G", "bias"))
    came = Record(0, X, seen={"A": A, "G": G})
    came.complete()
    assert came.seen["G"] is G
    assert "gn" not in came.seen


def test_bias_terms_are_added_by_token_or_by_image() -> None:
    record = Record(0, X)
    for _ in range(2):
        record.add_bias(torch.tensor([[1.0, 2, 3]]))
        record.add_bias(torch.tensor([[1.0, 2]]))
    assert record.end().bias.tolist() == [[2, 4, 6]]  # type: ignore[union-attr]
    assert record.end().scalar_bias.tolist() == [6]  # type: ignore[union-attr]


def test_parts_of_the_block_are_opened_once_and_only_when_asked_for() -> None:
    opened: list[int] = []
    record = Record(0, X, open_parts=lambda: opened.append(1) or "parts")
    first, second = Evidence(record), Evidence(record)
    assert not opened
    assert first.parts == second.parts == "parts"
    assert len(opened) == 1

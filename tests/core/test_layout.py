"""Layout and geometry: round trips of order and suffix, and the part of the input of each cell."""

from __future__ import annotations

import pytest
import torch

from patchlight.core.layout import Geometry, Layout
from tests.helpers import refuses


@pytest.mark.parametrize("order", [None, (2, 0, 1, 5, 3, 4)])
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (1, 0), (2, 3)])
def test_cells_go_to_tokens_and_back(prefix: int, suffix: int, order: tuple[int, ...] | None) -> None:
    layout = Layout((2, 3), prefix, suffix, order=order)
    values = torch.arange(12.0).view(2, 6) + 1
    tokens = layout.of_tokens(values)
    assert tokens.shape == (2, layout.count)
    assert layout.count == prefix + 6 + suffix
    assert torch.equal(layout.of_cells(tokens), values)
    assert not tokens[:, :prefix].any()
    assert not tokens[:, prefix + 6 :].any()
    places = layout.places(torch.tensor([[4, 1], [0, 5]]))
    assert places[:, :prefix].tolist() == [list(range(prefix))] * 2
    assert tokens[0, places[0, prefix : prefix + 2]].tolist() == [5, 2]
    assert places[:, prefix + 2 :].tolist() == [list(range(prefix + 6, layout.count))] * 2


def test_order_is_the_place_of_each_cell() -> None:
    space_major = tuple((r * 4 + c) * 3 + t for t in range(3) for r in range(2) for c in range(4))
    layout = Layout((3, 2, 4), 1, axes=("time", "row", "column"), order=space_major)
    cell = (1 * 2 + 1) * 4 + 2  # time 1, row 1, column 2
    assert layout.places(torch.tensor([[cell]])).tolist() == [[0, 1 + (1 * 4 + 2) * 3 + 1]]
    assert Layout((2, 2), order=tuple(range(4))) == Layout((2, 2))


def test_wrong_layouts_are_refused() -> None:
    refuses("name each once", Layout, (2, 4, 4))
    refuses("0 to 3", Layout, (2, 2), order=(0, 0, 1, 2))
    refuses("one value per axis", Geometry, (4, 4), (1.0,), (1.0, 1.0), (0.0, 0.0))


@pytest.mark.parametrize(
    ("shape", "dims"), [((4, 3, 8, 6), (0, 2, 3)), ((3, 4, 8, 6), (1, 2, 3)), ((4, 8, 6, 3), (0, 1, 2))]
)
def test_inputs_with_channels_first_and_back(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    geometry = Geometry.even((2, 4, 3), (4, 8, 6), dims=dims, unit=("frame", "px", "px"))
    images = torch.randn(2, *shape)
    assert geometry.channels_first(images).shape == (2, 3, 4, 8, 6)
    assert torch.equal(geometry.as_input(geometry.channels_first(images)), images)


def test_sound_has_no_channels_and_its_cells_overlap() -> None:
    geometry = Geometry((32, 64), (10, 10), (16, 16), (0, 0), ("Hz", "s"), (1, 0))
    assert geometry.extent((2, 5)) == (26, 56)
    sound = torch.randn(2, 64, 32)
    assert geometry.channels_first(sound).shape == (2, 1, 32, 64)
    assert torch.equal(geometry.as_input(geometry.channels_first(sound), channel=False), sound)

"""The heat map: that colours order, that cells show what was used, and that there is a word to everything."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from saved_files import random_stats

from sharpi.cli.heat_map import colours, draw, relative_uses
from sharpi.planning.expert_stats import COUNTS, ExpertStats

# What people without red, green or blue cones see of linear sRGB, and what all see as brightness.
# (Machado, Oliveira, Fernandes, "A physiologically-based model for simulation of color vision deficiency", 2009)
SEEN = {
    "all": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])


def stats_of(uses: np.ndarray, **changes) -> ExpertStats:
    layers, experts = uses.shape
    nothing = {name: np.zeros_like(uses) for name in COUNTS}
    return replace(random_stats(), **{"layers": tuple(range(layers)), "present": (experts,) * layers, **nothing,
                                      "uses": uses, **changes})


def picture(stats: ExpertStats) -> np.ndarray:
    data = draw(stats)
    assert data.startswith(b"\x89PNG")
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def expected_cells(stats: ExpertStats) -> np.ndarray:
    """The colours [layers, experts, 3] by the legend's words, for layers that have all experts."""
    relative = stats.uses / stats.uses.mean(axis=1, keepdims=True)
    return colours(np.sqrt(relative / max(2.0, relative.max())))


def find(image: np.ndarray, cells: np.ndarray) -> tuple[int, int, int, int]:
    """The place of the cells: left, top, and a cell's width and height."""
    for top, left in np.argwhere((image == cells[0, 0]).all(axis=2)):
        across = int(np.argmin((image[top, left:] == cells[0, 0]).all(axis=1)))
        down = int(np.argmin((image[top:, left] == cells[0, 0]).all(axis=1)))
        whole = cells.repeat(down, axis=0).repeat(across, axis=1)
        if np.array_equal(image[top : top + whole.shape[0], left : left + whole.shape[1]], whole):
            return int(left), int(top), across, down
    raise AssertionError("the cells are nowhere in the picture")


def random_uses(layers: int, experts: int) -> np.ndarray:
    return np.random.default_rng(layers * 1000 + experts).permutation(layers * experts).reshape(
        layers, experts).astype(np.uint64) ** 2 + np.uint64(1)


@pytest.mark.parametrize("eyes", SEEN)
def test_colours_grow_brighter_for_every_eye(eyes: str) -> None:
    srgb = colours(np.linspace(0.0, 1.0, 33)) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    brightness = np.cbrt(np.clip(linear @ SEEN[eyes].T, 0, None) @ LUMINANCE)  # about as it is perceived
    steps = np.diff(brightness)
    assert steps.min() > 0.4 * steps.mean() and steps.max() < 2 * steps.mean()
    assert brightness[0] < 0.3 and brightness[-1] > 0.9


def test_values_beyond_the_scale_are_its_ends() -> None:
    low, zero, one, high = colours(np.array([-1.0, 0.0, 1.0, 2.0])).tolist()
    assert low == zero and one == high and zero != one


@pytest.mark.parametrize(("layers", "experts"), [(1, 2), (2, 8), (12, 8), (48, 128), (94, 512)])
def test_every_cell_has_its_colour(layers: int, experts: int) -> None:
    stats = stats_of(random_uses(layers, experts))
    image = picture(stats)
    left, top, across, down = find(image, expected_cells(stats))
    assert across >= 2 and down >= 4
    assert image.shape[1] <= 1400 and image.shape[0] <= 1000
    # Numbers and words on all sides: title above, layers to the left, experts below, the scale to the right.
    ink = (image < 100).all(axis=2)
    for side in (ink[: top - 1], ink[top:, : left - 1], ink[top + layers * down + 1 :],
                 ink[top:, left + experts * across + 45 :]):
        assert side.sum() > 20


def test_the_scale_shows_the_colours_of_the_cells() -> None:
    stats = stats_of(random_uses(6, 16))
    image = picture(stats)
    left, top, across, down = find(image, expected_cells(stats))
    column = image[top : top + 6 * down, left + 16 * across + 28]
    assert np.array_equal(column, colours(np.linspace(1.0, 0.0, 6 * down)))


def test_uses_are_compared_within_a_layer() -> None:
    stats = stats_of(np.array([[1, 2, 3], [100, 200, 300], [0, 0, 0]], np.uint64))
    assert relative_uses(stats).tolist() == [[0.5, 1.0, 1.5], [0.5, 1.0, 1.5], [0.0, 0.0, 0.0]]


def test_experts_that_a_layer_lacks_are_left_grey() -> None:
    stats = stats_of(np.array([[5, 9, 0, 0], [4, 3, 2, 1]], np.uint64), present=(2, 4))
    assert np.isnan(relative_uses(stats)).tolist() == [[False, False, True, True], [False] * 4]
    assert relative_uses(stats)[0, 0] == 5 / 7
    grey = (picture(stats) == 200).all(axis=2)
    assert grey.sum() > 1000
    assert not (picture(replace(stats, present=(4, 4))) == 200).all(axis=2).sum() > 1000


def test_nothing_used_and_odd_names_are_drawn() -> None:
    nothing = stats_of(np.zeros((3, 4), np.uint64))
    shape = picture(nothing).shape
    for name in ("", "x" * 5000, "\x1b[31m\n\u4e2d\u6587\U0001f600"):
        assert picture(replace(nothing, model=name)).shape == shape
    assert not np.array_equal(picture(replace(nothing, model="a")), picture(replace(nothing, model="b")))


LINES = 120


def test_the_scale_is_marked_where_its_values_are() -> None:
    for uses in (random_uses(6, 16), np.array([np.roll([1000] + [1] * 199, row) for row in range(20)], np.uint64)):
        stats = stats_of(uses)
        image = picture(stats)
        left, top, across, down = find(image, expected_cells(stats))
        layers, experts = uses.shape
        height, most = layers * down, max(2.0, float(np.nanmax(relative_uses(stats))))
        beside = image[:, left + experts * across + 20 + 16 + 2]  # between the bar and the numbers
        marked = np.flatnonzero((beside == LINES).all(axis=1))
        values = ((top + height - 1 - marked) / (height - 1)) ** 2 * most
        # Marks are a pixel exact, which is so much of a value.
        exact = 2 * np.sqrt(values * most) / (height - 1) + 0.001
        wanted = [value for value in (0, 0.25, 1, 2, 4, 8, 16, 32, 64, 128, 256) if value <= most]
        assert {0, 1} <= {value for value in wanted if (abs(values - value) <= exact).any()}
        assert all(any(abs(value - near) <= room for near in wanted) for value, room in zip(values, exact, strict=True))
        assert len(values) > 2 and values.max() >= most / 4, "the scale is marked up to its end"
        assert (np.diff(marked) >= 15).all(), "and the numbers have room"


def test_axes_are_marked_outside_of_the_map() -> None:
    stats = stats_of(random_uses(6, 16))
    image = picture(stats)
    left, top, across, down = find(image, expected_cells(stats))
    below = (image[top + 6 * down + 2, left:left + 16 * across] == LINES).all(axis=1)
    beside = (image[top:top + 6 * down, left - 4] == LINES).all(axis=1)
    for marks, cell in ((np.flatnonzero(below), across), (np.flatnonzero(beside), down)):
        assert len(marks) > 2 and marks[0] // cell == 0
        assert (abs(marks % cell - cell // 2) <= 1).all(), "in the middle of cells"


def test_words_along_the_sides_are_whole() -> None:
    stats = stats_of(random_uses(48, 128))
    image = picture(stats)
    left, top, across, down = find(image, expected_cells(stats))
    ink = (image < 100).all(axis=2)
    for side, word in ((ink[:, left + 128 * across + 20 + 16 + 35:], "uses / layer's mean"), (ink[:, :24], "layer")):
        rows = np.flatnonzero(side[top:top + 48 * down].any(axis=1))
        assert np.ptp(rows) > 5 * len(word), f"{word!r} is cut off"
        middle = (rows[0] + rows[-1]) / 2
        assert abs(middle - 24 * down) < 12, f"{word!r} is not in the middle"

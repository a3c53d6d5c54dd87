"""A picture of which experts a model uses: a row for each layer, a column for each expert, the brighter the more.

Lightness alone orders the colours, from a dark blue over red to a light yellow, so that they can be read by people who
see few colours, and in print without any. Cells are drawn relative to their layer's mean: 1 is what even routing would
use.
"""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from sharpi.planning.expert_stats import ExpertStats

__all__ = ["colours", "draw", "relative_uses"]

# The scale in OKLab (lightness, green to red, blue to yellow), where equal steps look equal: its ends, and what the way
# from one to the other bends to; there lightness is half way, so that it grows evenly.
_DARK, _BEND, _LIGHT = (0.20, 0.02, -0.10), (0.58, 0.24, 0.02), (0.96, -0.02, 0.11)
_ABSENT = (200, 200, 200)  # an expert that a layer does not have
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_PAPER, _INK, _LINES = (255, 255, 255), (30, 30, 30), (120, 120, 120)

_MARGIN = 16
_LARGE, _SMALL = 18, 13  # sizes of letters, pixels
_LEGEND = 100  # width of the scale and its numbers


def colours(values: np.ndarray) -> np.ndarray:
    """uint8 [..., 3]: sRGB of values from 0 (dark) to 1 (light)."""
    at = np.clip(values, 0.0, 1.0)[..., None]
    lab = (1 - at) ** 2 * np.array(_DARK) + 2 * at * (1 - at) * np.array(_BEND) + at**2 * np.array(_LIGHT)
    # OKLab to linear sRGB: https://bottosson.github.io/posts/oklab/
    cones = (lab @ np.array([[1.0, 1.0, 1.0],
                             [0.3963377774, -0.1055613458, -0.0894841775],
                             [0.2158037573, -0.0638541728, -1.2914855480]])) ** 3
    linear = np.clip(cones @ np.array([[4.0767416621, -1.2684380046, -0.0041960863],
                                       [-3.3077115913, 2.6097574011, -0.7034186147],
                                       [0.2309699292, -0.3413193965, 1.7076147010]]), 0.0, 1.0)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.round(255 * srgb).astype(np.uint8)


def relative_uses(stats: ExpertStats) -> np.ndarray:
    """float [layers, experts]: uses over their layer's mean; 0 in layers without any, NaN where there is no expert."""
    present = np.array(stats.present)[:, None]
    mean = stats.uses.sum(axis=1, keepdims=True) / present
    relative = stats.uses / np.where(mean > 0, mean, 1.0)
    return np.where(np.arange(stats.experts) < present, relative, np.nan)


def draw(stats: ExpertStats) -> bytes:
    """The picture, as a PNG file's bytes."""
    relative = relative_uses(stats)
    top = max(2.0, float(np.nanmax(relative)))
    # The root leaves room for differences among the many when a few are used far more.
    cells = np.where(np.isnan(relative)[..., None], _ABSENT, colours(np.sqrt(np.nan_to_num(relative) / top)))
    across, down = _cell_size(*relative.shape)
    map_image = Image.fromarray(cells.astype(np.uint8).repeat(down, axis=0).repeat(across, axis=1))

    large, small = ImageFont.load_default(_LARGE), ImageFont.load_default(_SMALL)
    left, above = _MARGIN + 2 * _SMALL + 40, _MARGIN + _LARGE + _SMALL + 22
    width = left + map_image.width + _LEGEND + _MARGIN
    height = above + map_image.height + 2 * _SMALL + 20 + _MARGIN
    image = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(image)
    title = _fitting(f"Use of experts: {stats.model}", large, width - 2 * _MARGIN)
    pen.text((_MARGIN, _MARGIN), title, _INK, large)
    pen.text((_MARGIN, _MARGIN + _LARGE + 6), _fitting(_subtitle(stats), small, width - 2 * _MARGIN), _LINES, small)
    image.paste(map_image, (left, above))
    box = (left, above, left + map_image.width, above + map_image.height)
    pen.rectangle((box[0] - 1, box[1] - 1, box[2], box[3]), outline=_LINES)
    _axes(image, pen, small, box, stats, (across, down))
    _scale(image, pen, small, (box[2] + 20, box[1], box[3]), top)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _cell_size(layers: int, experts: int) -> tuple[int, int]:
    """Pixels of a cell, across and down: large enough to see, the picture not too large for a page."""
    across = max(2, min(48, 1024 // experts), 320 // experts)
    return across, max(min(across * 2, 32, max(6, 576 // layers)), 160 // layers)


def _subtitle(stats: ExpertStats) -> str:
    said = f"{int(stats.uses.sum()):,} uses"
    if stats.hit_rate is not None and stats.capacity:
        said += f"; slots for {stats.capacity:,} of {sum(stats.present):,} experts, hit rate {stats.hit_rate:.1%}"
    return said


def _axes(image: Image.Image, pen: ImageDraw.ImageDraw, font: _Font, box: tuple[int, int, int, int],
          stats: ExpertStats, cell: tuple[int, int]) -> None:
    """Numbers of experts below the map and of layers beside it, as many as there is room for, and what they count."""
    left, above, right, below = box
    for expert in range(0, stats.experts, _step(cell[0], 44)):
        at = left + expert * cell[0] + cell[0] // 2
        pen.line((at, below + 1, at, below + 4), _LINES)
        pen.text((at, below + 6), str(expert), _INK, font, anchor="ma")
    for row in range(0, len(stats.layers), _step(cell[1], 20)):
        at = above + row * cell[1] + cell[1] // 2
        pen.line((left - 5, at, left - 2, at), _LINES)
        pen.text((left - 8, at), str(stats.layers[row]), _INK, font, anchor="rm")
    pen.text(((left + right) // 2, below + 10 + _SMALL), "expert", _INK, font, anchor="ma")
    _write_upwards(image, font, "layer", (_MARGIN, (above + below) // 2))


def _scale(image: Image.Image, pen: ImageDraw.ImageDraw, font: _Font, where: tuple[int, int, int],
           top: float) -> None:
    """The colours' meaning: a bar from 0 below to `top`; where: its left, top and bottom edge."""
    left, above, below = where
    right, height = left + 16, below - above
    bar = colours(np.linspace(1.0, 0.0, height))[:, None, :].repeat(right - left, axis=1)
    image.paste(Image.fromarray(bar), (left, above))
    pen.rectangle((left - 1, above - 1, right, below), outline=_LINES)
    for value in _ticks(top, height):
        at = below - 1 - round((height - 1) * (value / top) ** 0.5)
        pen.line((right + 1, at, right + 4, at), _LINES)
        pen.text((right + 7, at), f"{value:g}", _INK, font, anchor="lm")
    _write_upwards(image, font, "uses / layer's mean", (right + 45, (above + below) // 2))


def _ticks(top: float, height: int) -> list[float]:
    """Round values from 0 to `top`, no two closer than a line of text on a scale by the root; 1, the mean, is one."""
    taken = [0.0, 1.0]
    for value in (0.25, 4.0, 2.0, 16.0, 8.0, 64.0, 32.0, 256.0, 128.0, 512.0):
        apart = min(abs((value / top) ** 0.5 - (other / top) ** 0.5) for other in taken)
        if value <= top and apart * height >= 1.5 * _SMALL:
            taken.append(value)
    return sorted(taken)


def _step(cell: int, room: int) -> int:
    """Every how manyeth cell gets its number, each taking `room` pixels: a power of two."""
    step = 1
    while step * cell < room:
        step *= 2
    return step


def _write_upwards(image: Image.Image, font: _Font, text: str, centre: tuple[int, int]) -> None:
    """Text turned to the left; centre: the middle of its left edge on the page, and of its length."""
    length = round(font.getlength(text))
    strip = Image.new("RGB", (length, _SMALL + 4), _PAPER)
    ImageDraw.Draw(strip).text((0, 0), text, _INK, font)
    image.paste(strip.rotate(90, expand=True), (centre[0], centre[1] - length // 2))


def _fitting(text: str, font: _Font, width: int) -> str:
    """The text, or as much of its beginning as fits."""
    text = "".join(c if c.isprintable() else "?" for c in text[:width])
    if font.getlength(text) <= width:
        return text
    count = bisect_right(range(len(text)), width, key=lambda count: math.ceil(font.getlength(text[:count] + "...")))
    return text[: count - 1] + "..."

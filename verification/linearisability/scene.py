"""A drawing of boxes, lines and text, as one self-contained SVG or as a PNG."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FONT = 11


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle. dashed: its outcome is unknown. hint: shown where the reader points."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str = "none"
    thick: float = 1.0
    dashed: bool = False
    faint: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    line: str
    thick: float = 1.0
    dashed: bool = False
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Text that starts at (x, y), its baseline, or ends there."""

    x: float
    y: float
    text: str
    fill: str = "#222222"
    size: float = FONT
    bold: bool = False
    at_end: bool = False
    faint: bool = False


@dataclass(slots=True)
class Scene:
    """Drawn in the order of the list; all lengths are pixels, y grows downwards."""

    width: float = 0.0
    height: float = 0.0
    title: str = ""
    items: list[Box | Line | Text] = field(default_factory=list)


def to_svg(scene: Scene) -> str:
    """SVG 1.1 without anything from outside; `title` elements hold the hints."""
    size = f'width="{scene.width:.0f}" height="{scene.height:.0f}" viewBox="0 0 {scene.width:.0f} {scene.height:.0f}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f"<title>{escape(scene.title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    out += [_element(item) for item in scene.items]
    return "\n".join([*out, "</svg>"]) + "\n"


def _element(item: Box | Line | Text) -> str:
    opacity = ' opacity="0.35"' if item.faint else ""
    if isinstance(item, Text):
        bold = ' font-weight="bold"' if item.bold else ""
        anchor = ' text-anchor="end"' if item.at_end else ""
        at = f'x="{item.x:.1f}" y="{item.y:.1f}" font-size="{item.size:g}" fill="{item.fill}"'
        return f"<text {at}{bold}{anchor}{opacity}>{escape(item.text)}</text>"
    dash = ' stroke-dasharray="4 3"' if item.dashed else ""
    if isinstance(item, Line):
        ends = f'x1="{item.x1:.1f}" y1="{item.y1:.1f}" x2="{item.x2:.1f}" y2="{item.y2:.1f}"'
        return f'<line {ends} stroke="{item.line}" stroke-width="{item.thick:g}"{dash}{opacity}/>'
    stroke = "" if item.line == "none" else f' stroke="{item.line}" stroke-width="{item.thick:g}"{dash}'
    at = f'x="{item.x:.1f}" y="{item.y:.1f}" width="{item.width:.1f}" height="{item.height:.1f}"'
    head = f'<rect {at} fill="{item.fill}"{stroke}{opacity}'
    return f"{head}><title>{escape(item.hint)}</title></rect>" if item.hint else f"{head}/>"


def write_png(scene: Scene, path: Path) -> None:
    """The same as a PNG, by matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(scene.width / 100, scene.height / 100), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    for item in scene.items:
        alpha = 0.35 if item.faint else 1.0
        if isinstance(item, Text):
            weight, side = ("bold" if item.bold else "normal"), ("right" if item.at_end else "left")
            points = item.size * 0.72
            axes.text(
                item.x, item.y, item.text, color=item.fill, fontsize=points, ha=side, weight=weight, alpha=alpha,
                parse_math=False,
            )  # fmt: skip
        elif isinstance(item, Line):
            style = "--" if item.dashed else "-"
            ends = [item.x1, item.x2], [item.y1, item.y2]
            axes.plot(*ends, color=item.line, linewidth=item.thick * 0.72, linestyle=style, alpha=alpha)
        else:
            axes.add_patch(
                Rectangle(
                    (item.x, item.y), item.width, item.height, facecolor=item.fill, edgecolor=item.line, alpha=alpha,
                    linewidth=item.thick * 0.72 if item.line != "none" else 0, linestyle="--" if item.dashed else "-",
                )
            )  # fmt: skip
    figure.savefig(path)

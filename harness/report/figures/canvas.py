"""Figures without pyplot: sizes, axes, and SVG that fits a light, a dark and a printed page.

Text and lines are drawn in a few marked colours; inside the page those become CSS variables, so
that one drawing follows the reader's colour scheme. A file of its own keeps the plain colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1d2329"
MUTED = "#5d6772"
RULE = "#d5dae0"
ACCEPT = "#2a7d4f"
REJECT = "#b3372f"
# Marked colour -> CSS variable of the page.
PAGE_COLOURS = {INK: "--ink", MUTED: "--muted", RULE: "--rule", ACCEPT: "--good", REJECT: "--bad"}

FONTS = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, small, in the page's own font
    "svg.hashsalt": "harness",  # the same findings give the same bytes
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11.0,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "path.simplify": True,
    "path.simplify_threshold": 0.3,
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Width of a drawing in points (CSS pixels of the page) and what it leaves room for.

    Attributes:
        width: Points.
        columns: Panels side by side.
    """

    name: str
    width: float
    columns: int

    @property
    def narrow(self) -> bool:
        """Whether this is the phone's drawing."""
        return self.columns == 1


WIDE = Size(name="wide", width=820, columns=2)
NARROW = Size(name="narrow", width=390, columns=1)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure of the report.

    Attributes:
        name: Identifier in file names and anchors.
        title: Heading.
        caption: What it shows and what to look for, in sentences.
        alt: What a reader who cannot see it should know.
        svg: Size name -> complete SVG with plain colours.
    """

    name: str
    title: str
    caption: str
    alt: str
    svg: dict[str, str]


@contextmanager
def drawing_settings() -> Iterator[None]:
    """Set the house look of figures while drawing; restored on exit."""
    import matplotlib

    # Matplotlib's stubs want a literal type that differs from release to release.
    settings: Any = _SETTINGS
    with matplotlib.rc_context(settings):
        yield


def panels(
    size: Size,
    *,
    rows: int,
    columns: int,
    row_height: float,
    left: float = 62,
    right: float = 16,
    top: float = 34,
    bottom: float = 44,
    gap_x: float = 62,
    gap_y: float = 58,
    share_y: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of axes; all lengths are in points.

    Axes come in reading order. Margins are fixed instead of fitted: fitting needs a full extra
    drawing and moves panels when a label changes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = top + bottom + rows * row_height + (rows - 1) * gap_y
    figure = Figure(figsize=(size.width / 72, height / 72), dpi=72)
    FigureCanvasAgg(figure)
    panel_width = (size.width - left - right - (columns - 1) * gap_x) / columns
    axes: list[Axes] = []
    for index in range(rows * columns):
        row, column = divmod(index, columns)
        x = left + column * (panel_width + gap_x)
        y = height - top - row_height - row * (row_height + gap_y)
        box = (x / size.width, y / height, panel_width / size.width, row_height / height)
        axes.append(figure.add_axes(box, sharey=axes[0] if share_y and axes else None))
    return figure, axes


def policy_margin(size: Size) -> float:
    """Return the pixels left of a panel whose rows are policies: a `policy_label` fits in bold."""
    return 126.0 if size.narrow else 132.0


def policy_label(policy: str) -> str:
    """Return a policy's name for a row, cut to 17 characters: `fp16_all_ops_cu..`."""
    return policy if len(policy) <= 17 else f"{policy[:15]}.."


def step_axis(ax: Axes, first: float, last: float, *, labels: int = 7) -> None:
    """Let the horizontal axis run over steps, which are counted in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(first, last)
    # One number is enough: a run of one step has no second whole step inside the axis.
    ax.xaxis.set_major_locator(
        MaxNLocator(labels, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    ax.set_xlabel("step")


def legend_on_top(
    figure: Figure, size: Size, handles: Sequence[Any], labels: Sequence[str], *, per_row: int = 0
) -> None:
    """Put one legend for all panels at the top edge of the figure."""
    columns = per_row or (2 if size.narrow else 4)
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        fontsize=10.5,
        borderaxespad=0.2,
        columnspacing=1.4,
        labelspacing=0.35,
    )


def legend_height(size: Size, count: int, *, per_row: int = 0) -> float:
    """Return the room in points that `legend_on_top` needs for `count` entries."""
    columns = per_row or (2 if size.narrow else 4)
    return 17.0 * -(-count // columns) + 10.0


def draw(
    name: str, *, title: str, caption: str, alt: str, render: Callable[[Size], Figure]
) -> Drawing:
    """Draw a figure at both sizes."""
    svg = {
        size.name: _svg(render(size), f"{name}-{size.name}", title, alt) for size in (WIDE, NARROW)
    }
    return Drawing(name=name, title=title, caption=caption, alt=alt, svg=svg)


def page_svg(svg: str, policy_colours: dict[str, str]) -> str:
    """Return the SVG with marked colours as CSS variables, for a page that defines them.

    Args:
        svg: Complete SVG of a `Drawing`.
        policy_colours: Plain colour -> CSS variable, besides `PAGE_COLOURS`.
    """
    text = re.sub(r"^<\?xml[^>]*\?>\s*", "", svg)
    for colour, variable in {**PAGE_COLOURS, **policy_colours}.items():
        text = text.replace(colour, f"var({variable})")
    return text


def _unique_ids(text: str, prefix: str) -> str:
    """Prefix identifiers; of two equal ones (equal marks have equal hashes) the first stays."""
    seen: set[str] = set()

    def renamed(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return f' id="{prefix}-{match[1]}"'

    return re.sub(r'\sid="([^"]*)"', renamed, text)


def _rounded_path(match: re.Match[str]) -> str:
    """Round a path's coordinates to 0.1 points, below what a screen shows: half the bytes."""
    body = re.sub(r"-?\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}", match[1])
    return f' d="{body}"'


def _without_repetition(text: str) -> str:
    """Drop what every line repeats: the font (the root element names it), comments, indentation."""
    text = re.sub(r"(; )?font-family: 'DejaVu Sans'[^;\"]*", "", text)
    text = re.sub(r"\s*<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"\n\s+", "\n", text)


def _svg(figure: Figure, prefix: str, title: str, alt: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = _without_repetition(text)
    text = re.sub(r' d="([^"]*)"', _rounded_path, text)
    # Several drawings share one page: every identifier gets its drawing's name in front.
    text = _unique_ids(text, prefix)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    label = (
        f'<title id="{prefix}-title">{escape(title)}</title>'
        f'<desc id="{prefix}-desc">{escape(alt)}</desc>'
    )
    opening = text.index(">") + 1
    head = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', text[: opening - 1])
    head += f' style="font-family: {FONTS}" role="img"'
    head += f' aria-labelledby="{prefix}-title {prefix}-desc">'
    return '<?xml version="1.0" encoding="utf-8"?>\n' + head + label + text[opening:]

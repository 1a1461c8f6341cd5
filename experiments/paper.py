"""The paper's tables and figures, ours beside the paper's.

    python experiments/paper.py all                 every one, 45 minutes at most on two free cores
    python experiments/paper.py table4 fig8         some
    python experiments/paper.py all --quick         a try: small configurations, short searches
    python experiments/paper.py page                only write docs/results/paper.md from the CSVs

Each writes NAME.csv and NAME.svg to docs/results/paper/ (a try to runs/paper/), and the page is
written again after each.
"""

import importlib.util
import sys
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
if importlib.util.find_spec("octojax") is None:  # run from a checkout that is not installed
    sys.path.insert(1, str(HERE.parent))

from paper_pieces.cells import read_cells, write_cells  # noqa: E402
from paper_pieces.page import page, section  # noqa: E402
from paper_pieces.piece import Piece  # noqa: E402
from paper_pieces.registry import PIECES, chosen  # noqa: E402
from paper_pieces.study import Settings, Study  # noqa: E402

RESULTS = HERE.parent / "docs" / "results"


def main(
    names: Annotated[list[str], typer.Argument(help=f"{', '.join(PIECES)}, all, or page.")],
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Search on a large configuration.")
    ] = Settings.seconds,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small configurations, half a second each.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of CSVs and pictures [docs/results/paper].")
    ] = None,
) -> None:
    """Regenerate the paper's tables and figures."""
    folder = out or (Path("runs") / "paper" if quick else RESULTS / "paper")
    settings = Settings(seconds, quick, folder)
    if names == ["page"]:
        redraw(settings)
        return
    run(chosen(names), settings)


def run(pieces: list[Piece], settings: Settings) -> None:
    """Runs the pieces one after the other, and writes what each of them makes at once.

    Exits with the failures of pieces at the end, with code 1.
    """
    console = Console()
    expected_s = list(accumulate(piece.estimate_s(settings) for piece in pieces))
    study = Study(settings, console, expected_s[-1])
    failures: list[str] = []
    with study.bar:
        for piece, till_s in zip(pieces, expected_s, strict=True):
            try:
                cells = piece.run(study)
            except ValueError as error:  # what is stored of it stays; the others go on
                failures.append(f"{piece.name}: {error}")
                console.print(failures[-1], markup=False, highlight=False, soft_wrap=True)
                study.finish(till_s)
                continue
            write_cells(settings.out / f"{piece.name}.csv", cells)
            if piece.draw is not None:
                piece.draw(cells, settings.out / f"{piece.name}.svg")
            console.print(
                section(piece, cells, False), markup=False, highlight=False, soft_wrap=True
            )
            write_page(settings)
            study.finish(till_s)
    if failures:
        raise SystemExit("\n".join(failures))
    console.print(f"written to {settings.out}, page {page_path(settings)}", highlight=False)


def redraw(settings: Settings) -> None:
    """Draws every stored piece again and writes the page."""
    for piece in PIECES.values():
        cells = read_cells(settings.out / f"{piece.name}.csv")
        if cells and piece.draw is not None:
            piece.draw(cells, settings.out / f"{piece.name}.svg")
    write_page(settings)
    print(f"written to {page_path(settings)}")


def write_page(settings: Settings) -> None:
    text = page(PIECES.values(), settings.out)
    page_path(settings).write_text(text, encoding="utf-8")


def page_path(settings: Settings) -> Path:
    return settings.out.parent / "paper.md"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except (ValueError, ModuleNotFoundError) as error:
        print(f"paper: {error}", file=sys.stderr)
        sys.exit(2)

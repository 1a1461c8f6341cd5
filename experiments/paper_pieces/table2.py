"""TABLE II: the nine configurations, with what the paper leaves open, and their parameters."""

from functools import cache
from typing import Any

from paper_pieces.cells import Cell
from paper_pieces.piece import Piece
from paper_pieces.study import Settings, Study

TABLE_2 = {
    "LLaMA": ("llama:Llama", 1536, {"S": (32, 128), "M": (64, 256), "L": (128, 512)}),
    "Jamba": ("jamba:Jamba", 2048, {"S": (16, 64), "M": (32, 128), "L": (64, 256)}),
    "Nemotron-H": (
        "nemotron_h:NemotronH",
        1024,
        {"S": (56, 128), "M": (112, 256), "L": (224, 512)},
    ),
}
"""Model -> its module and class, H, and L and V (in 1,024 words) by size, as printed."""


@cache
def preset(model: str, size: str) -> tuple[Any, int]:
    """Returns the configuration of `octojax.models` and its number of parameters, counted on
    shapes alone.
    """
    import importlib

    from flax import nnx

    from octojax.models import count_parameters

    family, _, name = TABLE_2[model][0].partition(":")
    module = importlib.import_module(f"octojax.models.{family}")
    config, build = module.octopipe_table_2(size), getattr(module, name)
    shapes = nnx.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    return config, count_parameters(shapes)


def run(study: Study) -> list[Cell]:
    cells = []
    for model, (_, width, sizes) in TABLE_2.items():
        for size, (layers, words) in sizes.items():
            if size.lower() not in study.settings.sizes:
                continue
            with study.job(f"parameters of {model} {size}", 2.0):
                config, parameters = preset(model, size)
            count = len(config.pattern) if hasattr(config, "pattern") else config.layers
            for quantity, ours, paper in (
                ("layers L", count, layers),
                ("vocabulary V", config.vocabulary, words * 1024),
                ("width H", config.width, width),
            ):
                cells.append(
                    Cell(model, size, quantity, "exact", float(ours), str(paper), aim="equal")
                )
            cells.append(Cell(model, size, "parameters", "exact", float(parameters)))
    return cells


def estimate_s(settings: Settings) -> float:
    return 6.0 * len(settings.sizes)


PIECE = Piece(
    "table2",
    "TABLE II: model configurations",
    """
The paper gives L, V and H. What else makes a model is ours, chosen from published models of the
same families (presets `llama-s` to `nemotron-h-l` of `octojax.models`): heads, feed-forward
widths, states and experts; so the parameters cannot be compared with the paper's. Nemotron-H's
L = 56 is the depth of Nemotron-Nano-9B-v2, whose pattern is taken once, twice and four times;
Jamba's V = 64k is that of Jamba v0.1.
""",
    run,
    estimate_s,
    across="quantity",
)

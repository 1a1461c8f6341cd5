"""Dotted paths of parameters."""

from collections.abc import Sequence


def common_path(paths: Sequence[str], whole: bool = False) -> str:
    """Returns the longest dotted path that all begin with, "" if there is none.

        layers.0.mlp.up.kernel layers.0.mlp.down.kernel  ->  layers.0.mlp

    Of a single path, the module that holds the leaf; with `whole`, the path itself.
    """
    split = [path.split(".") for path in dict.fromkeys(paths)]
    if len(split) == 1:
        words = split[0]
        holds_leaf = len(words) > 1 and not words[-1].isdigit()
        return ".".join(words[:-1] if holds_leaf and not whole else words)
    common = []
    for words in zip(*split):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common)

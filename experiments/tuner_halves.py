"""The second figure: blocks cut into mixer and feed-forward half, on LLaMA and Jamba.

    python experiments/tuner_halves.py --seconds 20

How a block's cost is split is an assumption, stated here: the mixer takes `MIXER[kind]` of every
time and size of the block, the feed-forward half the rest; the value between the halves is as
large as a block's output. For `attention+mlp` of LLaMA at 4k tokens with ffn 3.5 H, matrix
products alone would give about 0.33 (8 H^2 + attention of 24 H^2 in all); 0.4 allows for
attention's and the norms' lower efficiency. For Jamba the Mamba mixer is taken from the
difference between the blocks' and the attention block's times.
"""

import argparse
from dataclasses import asdict, replace

from tuner_common import CONFIGURATIONS, load, write_rows

from octojax.ir import LayerCost, Profile
from octojax.tune import tune

MIXER = {"attention+mlp": 0.4, "mamba1+mlp": 0.57, "mamba1+moe": 0.4}


def halves(profile: Profile) -> Profile:
    """Returns the profile with every block as two layers."""
    layers: list[LayerCost] = []
    for layer in profile.layers:
        share = MIXER.get(layer.kind)
        if share is None:
            layers.append(layer)
            continue
        mixer, ffn = layer.kind.split("+")
        for kind, part in ((mixer, share), (ffn, 1 - share)):
            costs = {
                k: v * part if k.endswith("_s") else int(v * part)
                for k, v in asdict(layer).items()
                if k != "kind" and v is not None
            }
            layers.append(LayerCost(kind, **costs | {"output_bytes": layer.output_bytes}))
    return replace(profile, layers=tuple(layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    tune(load("jamba-s"), iterations=1)
    rows = []
    for name in CONFIGURATIONS:
        if name.startswith("nemotron"):
            continue  # its layers are single mixers already
        whole = load(name)
        base = tune(whole, iterations=0).baselines["1f1b-split"]
        found = [tune(p, seconds=options.seconds) for p in (whole, halves(whole))]
        rows.append(
            {
                "configuration": name,
                "blocks_ms": round(found[0].makespan_s * 1e3, 2),
                "blocks_over_1f1b_split": round(base / found[0].makespan_s, 3),
                "halves_ms": round(found[1].makespan_s * 1e3, 2),
                "halves_over_1f1b_split": round(base / found[1].makespan_s, 3),
                "halves_bound_ms": round(found[1].lower_bound_s * 1e3, 2),
                "halves_gap": round(found[1].gap, 4),
            }
        )
        print(rows[-1], flush=True)
        write_rows("halves", rows)


if __name__ == "__main__":
    main()

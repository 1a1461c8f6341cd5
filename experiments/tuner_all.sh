#!/bin/bash
# Regenerate docs/results/tuner.md and its data: about an hour on two idle cores.
set -e
cd "$(dirname "$0")/.."
seconds=${1:-120}
for size in s m l; do
  python experiments/tuner_targets.py --only $size --seconds "$seconds" --name targets_$size
done
python experiments/tuner_targets.py --costs calibrated --host-cost 7e-5 --seconds "$seconds" --name host_cost
python experiments/tuner_search_cost.py --seconds "$seconds"
python experiments/tuner_ablation.py --seconds 20
python experiments/tuner_memory.py --seconds 20
python experiments/tuner_halves.py --seconds 30
python experiments/tuner_optimality.py
python experiments/tuner_report.py

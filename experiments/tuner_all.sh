#!/bin/bash
# Regenerate docs/results/tuner.md and its data: about 30 minutes on two idle cores.
# `tuner_all.sh 2` takes twice the seconds everywhere.
set -e
cd "$(dirname "$0")/.."
times=${1:-1}
python experiments/tuner_targets.py --only s --seconds $((5 * times)) --name five_seconds
python experiments/tuner_targets.py --only s --seconds $((15 * times)) --name targets_s
python experiments/tuner_targets.py --only m --seconds $((30 * times)) --name targets_m
python experiments/tuner_targets.py --only l --seconds $((120 * times)) --name targets_l
python experiments/tuner_targets.py --costs calibrated --host-cost 7e-5 --seconds $((30 * times)) --name host_cost
python experiments/tuner_memory.py --seconds $((5 * times))
python experiments/tuner_halves.py --seconds $((40 * times))
python experiments/tuner_optimality.py
python experiments/tuner_phases.py --iterations 160 --seeds 3
python experiments/tuner_report.py

"""Is a cap on the correction useful? AdamBMA with all units coupled, so that they can move each other.

    python benchmarks/correction_cap.py --data-dir FOLDER [--jobs 2]

Same protocol as first_look.py.
"""

from __future__ import annotations

from first_look import TASKS, main

OPTIONS = {
    "no coupling": {},
    "coupled, no cap": {"coupling": "all"},
    "coupled, cap 3": {"coupling": "all", "correction_cap": 3.0},
    "coupled, cap 1": {"coupling": "all", "correction_cap": 1.0},
}
ARMS = {name: {"optimizer": "AdamBMA", "options": {"weight_decay": 0.0, **own}} for name, own in OPTIONS.items()}
BASELINE = {"coupled, cap 3": "coupled, no cap", "coupled, cap 1": "coupled, no cap"}

if __name__ == "__main__":
    tasks = {"MNIST MLP, raw": TASKS["MNIST MLP, raw"]}
    main(__doc__, tasks, ARMS, BASELINE, "correction_cap")

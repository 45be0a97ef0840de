"""Makes docs/results/costs.png and .pdf: costs and multiplier of `ppo_lagrangian` over the steps of five trainings.

python benchmark/costs.py
"""

import json
from pathlib import Path

import numpy as np

from solorl.lab.results import figures

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 25  # --cost-limit
PANELS = ("cost of an episode, mean of the last 100", "multiplier λ")


def draw(seeds):
    """The figure of two panels; `seeds` has a table for each run: step, cost, multiplier."""
    figure, places = figures.grid(len(PANELS))
    for column, (place, title) in enumerate(zip(places, PANELS, strict=True), 1):
        for table in seeds:
            place.plot(table[:, 0], table[:, column], color=figures.COLOURS[0], linewidth=0.8, alpha=0.4)
        mean = np.mean([table[:, column] for table in seeds], 0)
        place.plot(seeds[0][:, 0], mean, color=figures.COLOURS[0], linewidth=2)
        place.set_title(title, fontsize=10)
        place.set_ylim(bottom=0)
        figures.numbers_below(place)
    places[0].axhline(LIMIT, color=figures.COLOURS[1], linestyle="--", linewidth=1.2)
    places[0].text(1e6, 31, "limit", ha="right", va="bottom", fontsize=9, color=figures.COLOURS[1])
    figure.supxlabel("steps; thick: the mean of five seeds", fontsize=10)
    return figure


if __name__ == "__main__":
    data = json.loads((ROOT / "benchmark/results/costs/ppo_lagrangian.json").read_text())
    runs = [np.array(rows) for rows in data["seeds"].values()]
    print(figures.save(draw(runs), ROOT / "docs/results/costs", ("png", "pdf")))

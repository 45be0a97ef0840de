"""Makes docs/first_hour.ipynb from docs/guides/first_hour.md: the text of the guide, and cells that run its commands.

python docs/notebook.py
"""

import json
import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
GUIDE, NOTEBOOK = DOCS / "guides/first_hour.md", DOCS / "first_hour.ipynb"
START = """This notebook is made from [the guide](guides/first_hour.md). Start Jupyter in the environment of the project
(`pip install jupyterlab` in it); what the cells write lands in the folder of the notebook."""


def link(match):
    """A link of the guide, as seen from the folder of the notebook."""
    return "](" + os.path.relpath(GUIDE.parent / match[1], DOCS)


def notebook():
    """The notebook as JSON."""
    title, text = re.sub(r"\]\((?![a-z]+:)([^)]+)", link, GUIDE.read_text(encoding="utf-8")).split("\n\n", 1)
    cells = []
    for number, part in enumerate(re.split(r"```bash\n(.*?)```\n", f"{title}\n\n{START}\n\n{text}", flags=re.S)):
        source = re.sub("^", "!" * (number % 2), part.strip(), flags=re.M)
        kind = (
            {"cell_type": "code", "execution_count": None, "outputs": []} if number % 2 else {"cell_type": "markdown"}
        )
        cells.append(kind | {"id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)})
    made = {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")

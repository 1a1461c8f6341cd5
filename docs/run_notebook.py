"""Executes the notebook of the documentation from its first cell to its last.

python docs/run_notebook.py            fails where a cell fails
python docs/run_notebook.py --write    and stores what the cells show
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "notebooks" / "model_to_plan.ipynb"


def run(write: bool) -> None:
    """Runs every cell in a new kernel; raises what a cell raises."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": "."}})
    client.execute()
    if write:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times differ in every run
        nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    run("--write" in sys.argv[1:])

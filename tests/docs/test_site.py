"""The site's pages are what the code says: commands, pictures, public names."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import octojax
from docs import make_pictures

DOCS = Path(__file__).parents[2] / "docs"
AGAIN = "run python docs/make_pictures.py"


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    named = {line.split(".")[-1] for line in re.findall(r"^::: (\S+)", page, re.MULTILINE)}
    missing = [x for x in dir(octojax) if not x.startswith("_") and x not in named]
    assert missing == []


def test_the_page_of_commands_is_their_help():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert page == make_pictures.commands(), AGAIN


def test_the_explanation_is_what_the_command_prints():
    page = (DOCS / "guides" / "explain.md").read_text(encoding="utf-8")
    assert page == make_pictures.with_explanation(page), AGAIN


@pytest.mark.parametrize("name", make_pictures.PICTURES)
def test_pictures_are_of_what_their_commands_draw(name, tmp_path):
    """Their texts, down to every action's name; looks may change between two runs of the script."""
    make_pictures.pictures(tmp_path)

    def words(path: Path) -> set[str]:
        root = ET.parse(path).getroot()
        return {"".join(x.itertext()).strip() for x in root.iter() if x.tag.endswith("}text")}

    stored, again = words(DOCS / "pictures" / name), words(tmp_path / name)
    headings = {x for x in again if "simulated" in x or "F = I = W" in x}
    assert len(headings) == 2
    assert headings <= stored, AGAIN


def test_every_page_is_reached_from_the_contents():
    contents = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {
        x.relative_to(DOCS).as_posix() for kind in ("md", "ipynb") for x in DOCS.rglob(f"*.{kind}")
    }
    listed = set(re.findall(r"- (\S+\.(?:md|ipynb))", contents))
    pages = {x for x in pages if ".ipynb_checkpoints" not in x}
    assert pages == listed, "add new pages to the nav of mkdocs.yml"


def test_links_stay_among_the_pages():
    """A link that leaves docs/ is none on the site, whose build would fail."""
    broken = [
        f"{page.name}: {target}"
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).resolve().is_relative_to(DOCS)
        or not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_notebook_has_been_run_without_errors():
    notebook = json.loads((DOCS / "notebooks" / "model_to_plan.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert any("Where the step goes" in "".join(x.get("text", "")) for x in outputs)

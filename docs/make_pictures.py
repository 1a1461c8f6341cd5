"""Makes what the documentation shows of the commands: pictures, texts, and the page of commands.

    python docs/make_pictures.py            into docs/
    python docs/make_pictures.py FOLDER     into a copy of docs/ in FOLDER

`docs/pictures/nemotron-h-s.plan.json` was made by
`octopipe tune experiments/profiles/nemotron-h-s.calibrated.json --iterations 5 -o PLAN`.
"""

import argparse
import contextlib
import io
import os
import re
from pathlib import Path

import typer

from octojax.cli import COMMANDS, build, main

DOCS = Path(__file__).resolve().parent
PROFILE = "experiments/profiles/nemotron-h-s.calibrated.json"
PLAN = "docs/pictures/nemotron-h-s.plan.json"
PICTURES = {
    "1f1b-and-zb-v.svg": "compare 1f1b zb-v --ranks 4 --microbatches 8",
    "nemotron-h-s.svg": f"compare {PLAN} 1f1b --profile {PROFILE}",
}
"""Files in docs/pictures and the commands that draw them, less `--svg FILE`."""
EXPLAINED = f"explain {PLAN} --profile {PROFILE}"


def run(arguments: list[str]) -> str:
    """Returns what a command prints, 100 columns wide, run in the repository's root."""
    out = io.StringIO()
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    with contextlib.chdir(DOCS.parent), contextlib.redirect_stdout(out):
        try:
            main(arguments)
        except SystemExit as stop:
            if stop.code:
                raise
    return out.getvalue()


def pictures(folder: Path) -> None:
    """Draws every picture into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in PICTURES.items():
        with contextlib.redirect_stderr(io.StringIO()):
            run([*command.split(), "--svg", str(folder / name)])


def with_explanation(page: str) -> str:
    """Returns the text of guides/explain.md with what the command prints in its text block."""
    text = run(EXPLAINED.split()).strip("\n")
    return re.sub(r"```text\n.*?\n```", lambda _: f"```text\n{text}\n```", page, flags=re.DOTALL)


def commands() -> str:
    """Returns the page of all commands: their help as tables."""
    group = typer.main.get_command(build())
    lines = [
        "# Commands",
        "",
        "Made by `python docs/make_pictures.py` from `octopipe COMMAND -h`. JSON goes to standard "
        "output with `--json`,",
        "errors to standard error with exit code 2. `octopipe --install-completion` teaches the "
        "shell commands, options and",
        "names of schedules.",
    ]
    for name in COMMANDS:
        command = group.commands[name]
        lines += ["", f"## {name}", "", *(command.help or "").split("\n"), "", "| | |", "|---|---|"]
        for parameter in command.params:
            if parameter.name == "help":
                continue
            lines.append(f"| {_names(parameter)} | {_escaped(_help(parameter))} |")
    return "\n".join(lines) + "\n"


def _names(parameter) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{x}`" for x in (*parameter.opts, *parameter.secondary_opts))


def _help(parameter) -> str:
    text, default = parameter.help or "", parameter.default
    told = "default" in text.lower() or default is None or isinstance(default, bool)
    if parameter.param_type_name == "option" and parameter.required:
        return f"{text} Required."
    return text if told else f"{text} Default: {default}."


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def make(folder: Path) -> None:
    """Writes everything into a folder like docs/."""
    pictures(folder / "pictures")
    (folder / "guides").mkdir(exist_ok=True)
    page = (DOCS / "guides" / "explain.md").read_text(encoding="utf-8")
    (folder / "guides" / "explain.md").write_text(with_explanation(page), encoding="utf-8")
    (folder / "commands.md").write_text(commands(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=DOCS, help="a copy of docs/ [docs/]"
    )
    make(parser.parse_args().folder)

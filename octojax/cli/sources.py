"""What the commands that draw and compare take: files and named schedules, under one profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from octojax.cli.read import expect_profile_of, read_json_or_none, read_table, read_timeline
from octojax.errors import FormatError
from octojax.ir import LoweredPlan, Plan, Profile, Schedule, Timeline

CostsOption = Annotated[
    str | None,
    typer.Option(help="Layer costs (JSON); default: units, F = I = W = 1 and B = 2 per stage."),
]
RanksOption = Annotated[
    int | None, typer.Option(help="Ranks of named schedules; default: the first file's.", min=1)
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(help="Microbatches of named schedules; default: the first file's.", min=1),
]
HtmlOption = Annotated[Path | None, typer.Option(help="Write a page to look around in.")]
SvgOption = Annotated[Path | None, typer.Option(help="Write a picture.")]

NAMED = "A name may have options: interleaved:chunks=2,group_size=8."


@dataclass(frozen=True)
class Source:
    """A file or named schedule. `note` says what its profile has otherwise than the one given."""

    name: str
    path: str
    content: Schedule | Plan | LoweredPlan | Timeline
    note: str = ""


def schedule_names(incomplete: str) -> list[str]:
    """Returns the names of schedules that begin so, for the shell's completion."""
    from octojax.schedules import SCHEDULES

    return [name for name in SCHEDULES if name.startswith(incomplete)]


def read_sources(
    words: Sequence[str],
    profile: Profile | None,
    any_profile: bool = False,
    ranks: int | None = None,
    microbatches: int | None = None,
) -> list[Source]:
    """Returns what the words name, each under a name of its own.

    A word that is no file may be a named schedule: its ranks and microbatches are those given,
    else those of the first file, else the profile's.
    """
    files = {word: _file(word) for word in words if not is_name(word)}
    sizes = next((f for f in files.values() if not isinstance(f, Timeline)), None)
    ranks = ranks or (sizes.num_ranks if sizes else None) or (profile.ranks if profile else None)
    microbatches = (
        microbatches
        or (_microbatches(sizes) if sizes else None)
        or (profile.microbatches if profile else None)
    )
    named = [word for word in words if is_name(word)]
    if named and (not ranks or not microbatches):
        raise ValueError(
            f"{', '.join(named)}: how many ranks and microbatches? Give --ranks and --microbatches"
        )
    sources = []
    for word in words:
        if word in files:
            content, name = files[word], _name(word, files[word])
            note = ""
            if profile is not None and not isinstance(content, Timeline):
                note = expect_profile_of(word, content, profile, any_profile)
        else:
            content, name, note = named_schedule(word, ranks or 0, microbatches or 0), word, ""
        sources.append(Source(name, word, content, note))
    return _apart(sources)


def is_name(word: str) -> bool:
    """Whether a word names a schedule rather than a file."""
    from octojax.schedules import SCHEDULES

    return word.partition(":")[0] in SCHEDULES and not Path(word).exists()


def named_schedule(word: str, ranks: int, microbatches: int) -> Schedule:
    """Returns the table of `NAME` or `NAME:chunks=2,key=value`."""
    from octojax.schedules import generate

    name, _, text = word.partition(":")
    pairs = [pair for pair in text.split(",") if pair]
    broken = [pair for pair in pairs if "=" not in pair]
    if broken:
        raise ValueError(f"{word}: {broken[0]!r} is no option. {NAMED}")
    options: dict[str, Any] = {
        key.strip().replace("-", "_"): value for key, _, value in (p.partition("=") for p in pairs)
    }
    chunks = options.pop("chunks", None)
    if chunks is not None and not chunks.isdecimal():
        raise ValueError(f"{word}: chunks={chunks}, expected a whole number")
    return generate(name, ranks, microbatches, None if chunks is None else int(chunks), **options)


def _file(word: str) -> Schedule | Plan | LoweredPlan | Timeline:
    from octojax.report.data import is_timeline

    if is_timeline(read_json_or_none(word)):
        return read_timeline(word)
    try:
        return read_table(word)
    except FormatError as error:
        if Path(word).exists() or Path(word).suffix:
            raise
        from difflib import get_close_matches

        from octojax.schedules import SCHEDULES

        near = get_close_matches(word.partition(":")[0], SCHEDULES, 1)
        hint = f"; did you mean the schedule {near[0]}?" if near else ""
        raise FormatError(f"{error}, or the name of a schedule{hint}") from None


def _microbatches(content: Any) -> int:
    return (content.schedule if isinstance(content, LoweredPlan) else content).num_microbatches


def _name(path: str, content: Any) -> str:
    own = content.name if isinstance(content, Plan | LoweredPlan) else ""
    return own or Path(path).stem


def _apart(sources: list[Source]) -> list[Source]:
    """The same sources, by their paths where several have one name, and numbered if need be."""
    names = [s.name for s in sources]
    paths = [s.path for s in sources]
    renamed = []
    for number, s in enumerate(sources):
        name = s.path if names.count(s.name) > 1 else s.name
        if paths.count(s.path) > 1:
            name = f"{name} ({paths[: number + 1].count(s.path)})"
        renamed.append(Source(name, s.path, s.content, s.note))
    return renamed

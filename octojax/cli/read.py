"""Reading the files that commands take, with errors that name the file and the remedy."""

from pathlib import Path

from octojax.errors import FormatError
from octojax.ir import LoweredPlan, Plan, Profile, Schedule, Timeline, uniform_partition
from octojax.ir.files import read_json, read_text


def read_schedule(path: str) -> Schedule | Plan:
    """Returns the plan in a `.json` file, or the schedule in a CSV table."""
    _expect_file(path)
    found = Plan.load(path) if path.endswith(".json") else Schedule.load(path)
    if found.num_stages == 0 or found.num_microbatches == 0:
        raise FormatError(
            f"{path}: the table has {found.num_ranks} rows and no action; expected one row of "
            f"actions such as 0F0 per rank"
        )
    return found


def read_table(path: str) -> Schedule | Plan | LoweredPlan:
    """Returns what `read_schedule` does, or a lowered plan as `octopipe lower -o` writes it."""
    _expect_file(path)
    if path.endswith(".json"):
        data = read_json(path)
        if isinstance(data, dict) and "lowered" in data:
            return LoweredPlan.from_json(data, path)
        return read_schedule(path)
    text = read_text(path)
    if "+" in text or "->" in text:  # joined actions, or exchanges at the end
        return LoweredPlan.from_csv(text, path)
    return read_schedule(path)


def read_profile(path: str) -> Profile:
    """Returns the profile in a JSON file."""
    _expect_file(path)
    return Profile.load(path)


def read_timeline(path: str) -> Timeline:
    """Returns the timeline in a JSON file."""
    from octojax.report import load_timeline

    _expect_file(path)
    return load_timeline(path)


def read_plan(path: str, profile: str) -> Plan:
    """Returns the plan in `path`; a bare table is cut uniformly for the layers of `profile`."""
    found = read_schedule(path)
    if isinstance(found, Plan):
        return found
    kinds = read_profile(profile).kinds
    return Plan(uniform_partition(kinds, found.num_stages), found.placement, found, name=path)


def expect_writable(*paths: str | Path | None) -> None:
    """Raises `ValueError` if one of `paths` cannot be a new file: before hours of work, not after.

    None stands for a file that is not asked for.
    """
    for path in map(Path, filter(None, paths)):
        if path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder; name a file in it")
        if not path.parent.is_dir():
            raise ValueError(
                f"cannot write {path}: there is no folder {path.parent}; make it first"
            )


def _expect_file(path: str) -> None:
    if not Path(path).exists():
        raise FormatError(f"{path} does not exist; expected a file")
    if Path(path).is_dir():
        raise FormatError(f"{path} is a folder; expected a file")

"""Reading the files that commands take, with errors that name the file and the remedy."""

from pathlib import Path

from octojax.errors import FormatError
from octojax.ir import Plan, Profile, Schedule


def read_schedule(path: str) -> Schedule | Plan:
    """Returns the plan in a `.json` file, or the schedule in a CSV table."""
    _expect_text(path)
    return Plan.load(path) if path.endswith(".json") else Schedule.load(path)


def read_profile(path: str) -> Profile:
    """Returns the profile in a JSON file."""
    _expect_text(path)
    return Profile.load(path)


def read_plan(path: str, profile: str) -> Plan:
    """Returns the plan in `path`; a bare table is cut uniformly for the layers of `profile`."""
    from octojax.simulate import uniform_partition

    found = read_schedule(path)
    if isinstance(found, Plan):
        return found
    layers = read_profile(profile).num_layers
    return Plan(uniform_partition(layers, found.num_stages), found.placement, found, name=path)


def _expect_text(path: str) -> None:
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise FormatError(f"{path} {what}; expected a file")
    try:
        Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FormatError(
            f"{path} is not UTF-8 text; expected a CSV table or a JSON file"
        ) from None

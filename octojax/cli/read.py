"""Reading the files that commands take, with errors that name the file and the remedy."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from octojax.errors import FormatError
from octojax.ir import LoweredPlan, Plan, Profile, Schedule, Timeline, uniform_partition
from octojax.ir.files import read_json, read_text

AnyProfile = Annotated[
    bool, typer.Option("--any-profile", help="Take a profile of another model than the plan's.")
]


def read_schedule(path: str) -> Schedule | Plan:
    """Returns the plan in a `.json` file, or the schedule in a CSV table."""
    _expect_file(path)
    if path.endswith(".json"):
        data = read_json(path)
        if kind := _other_kind(data):
            raise FormatError(
                f"{path} is {kind}; expected a plan: an object with partition, placement and "
                f"schedule, as `octopipe tune -o` writes it"
            )
        subject = Plan.from_json(data, path)
    else:
        subject = Schedule.load(path)
    if subject.num_stages == 0 or subject.num_microbatches == 0:
        raise FormatError(
            f"{path}: the table has {subject.num_ranks} rows and no action; expected one row of "
            f"actions such as 0F0 per rank"
        )
    return subject


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
    data = read_json(path)
    kind = _other_kind(data) if isinstance(data, dict) and "layers" not in data else None
    if isinstance(data, dict) and {"partition", "schedule"} <= data.keys():
        kind = "a plan"
    if kind:
        raise FormatError(f"{path} is {kind}, and lacks its list of 'layers'; expected a profile")
    return Profile.from_json(data, path)


def read_json_or_none(path: str) -> object:
    """Returns what a JSON file holds; None for any other file, which its reader will refuse."""
    if not path.endswith(".json") or not Path(path).is_file():
        return None
    try:
        return read_json(path)
    except FormatError:
        return None


def read_timeline(path: str) -> Timeline:
    """Returns the timeline in a JSON file."""
    from octojax.report import load_timeline

    _expect_file(path)
    return load_timeline(path)


def expect_profile_of(
    path: str, subject: Schedule | Plan | LoweredPlan, profile: Profile, allowed: bool = False
) -> str:
    """Returns what `profile` has otherwise than the one that the plan in `path` was made for.

    "" if nothing, or the plan does not say; what there is goes to standard error too. Raises
    `ValueError` if it is of another model, unless that is `allowed`.
    """
    if not isinstance(subject, Plan) or subject.prediction is None:
        return ""
    prediction, differences = subject.prediction, subject.prediction.differences(profile)
    if not differences:
        return ""
    if "model" in differences and not allowed:
        raise ValueError(
            f"{path} was made for profile {prediction.profile!r} (fingerprint "
            f"{prediction.fingerprint}); profile {profile.name!r} ({profile.fingerprint}) is of "
            f"another model: its layers have other kinds or parameters. Give the profile that the "
            f"plan was made for, or --any-profile to take this one all the same"
        )
    what = "another model" if "model" in differences else " and ".join(map(_other, differences))
    note = f"made for profile {prediction.profile!r}, which has {what} than this one"
    print(f"octopipe: {path} was {note}; the times are those of {profile.name!r}", file=sys.stderr)
    return note


def _other(part: str) -> str:
    return f"other {part}" if part.endswith("s") else f"another {part}"


def read_plan(path: str, profile: str) -> Plan:
    """Returns the plan in `path`; a bare table is cut uniformly for the layers of `profile`."""
    subject = read_schedule(path)
    if isinstance(subject, Plan):
        return subject
    kinds = read_profile(profile).kinds
    return Plan(uniform_partition(kinds, subject.num_stages), subject.placement, subject, name=path)


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


_KINDS = (
    ("a timeline", {"makespan_s", "actions"}),
    ("a profile", {"layers"}),
    ("the result of a search, whose plan `octopipe tune -o` writes by itself", {"plan", "gap"}),
    ("a lowered plan", {"lowered"}),
    ("a trace", {"traceEvents"}),
    ("a machine", {"latency_s"}),
)


def _other_kind(data: object) -> str | None:
    """Returns what kind of file, other than a plan, an object is; None if it may be one."""
    if not isinstance(data, dict) or data.keys() & {"partition", "placement", "schedule"}:
        return None
    if data and data.keys() <= {"version", "name", "ranks", "recompute", "prediction"}:
        return None  # a plan that lacks the rest
    named = (kind for kind, fields in _KINDS if fields <= data.keys())
    fields = ", ".join(map(repr, list(data)[:6])) or "nothing"
    return next(named, f"no file of octopipe's (it has {fields})")


def _expect_file(path: str) -> None:
    if path == "-":
        raise FormatError("- would be standard input, which is not read here; name a file")
    if not Path(path).exists():
        raise FormatError(f"{path} does not exist; expected a file")
    if Path(path).is_dir():
        raise FormatError(f"{path} is a folder; expected a file")

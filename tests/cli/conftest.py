"""Commands are run as a shell would: arguments in, exit code and both streams out."""

from collections.abc import Callable

import pytest

from octojax.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys) -> Command:
    """Returns `run(*arguments) -> (exit code, stdout, stderr)`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run

"""The progress of a search: lines where there is no terminal, and few of them."""

from octojax.tune.result import Progress
from octojax.tune.ticker import Ticker


def moment(seconds: float) -> Progress:
    return Progress(seconds, 3, "schedule", 0.0125, 0.25)


def test_lines_come_now_and_then_where_there_is_no_terminal(capsys):
    with Ticker(20.0, None) as ticker:
        for seconds in (1, 4.9, 5.5, 6, 10.4, 10.6, 11):
            ticker.show(moment(seconds))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "tune 6 s: iteration 3 schedule  12.500 ms, gap 25.00%",
        "tune 11 s: iteration 3 schedule  12.500 ms, gap 25.00%",
    ]


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Ticker(20.0, None) as ticker:
        ticker.show(moment(6))
    assert "tune 6 s" not in capsys.readouterr().err

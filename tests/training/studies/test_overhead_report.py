"""The benchmark of methods and their parts: its measurements and its report."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from benchmarks.overhead import PARTS, PLACES, REFERENCE, ROWS, Round, main, parts_table
from benchmarks.overhead import rounds_table as table_of


def rounds(processor: list[float], weighing: float, size: int) -> list[Round]:
    places = {"clients": 0.5, "server step": 0.25, "weighing": weighing}
    return [
        Round(seconds, 2 * seconds, {place: places[place] for place in PLACES}, size)
        for seconds in processor
    ]


def test_a_part_is_the_difference_of_two_rounds_over_splitfeds_of_the_same_turn() -> None:
    measured = {name: rounds([1.0, 2.0, 4.0], 0.0, 1_000) for name in ROWS}
    measured["BESplit"] = rounds([1.2, 2.2, 4.4], 0.04, 1_100)
    # .2 of 1, .2 of 2 and .4 of 4 are 20, 10 and 10 %; .04 of 1, 2 and 4 are 4, 2 and 1 %
    ea, _, dtd = parts_table(measured, [1.0]).splitlines()[2:5]
    assert ea.split(" | ")[2:] == [
        "10.00 (10.00 to 20.00)",
        "0.00 (0.00 to 0.00)",
        "0.00 (0.00 to 0.00)",
        "2.00 (1.00 to 4.00)",
        "10.00",
        "0.01 |",
    ]
    assert dtd.endswith("| 3.65 |")
    # a second of fine-tuning is half of the median round
    last = parts_table(measured, [1.0]).splitlines()[-1]
    assert "once after training | 50.00 (50.00 to 50.00) |" in last
    # 1.2, 1.1 and 1.1 rounds; the clients' half second is .5, .25 and .125 of them
    line = next(line for line in table_of(measured).splitlines() if line.startswith("| BESplit |"))
    assert line.split(" | ")[1:4] == ["1.10 (1.10 to 1.20)", "1.10 (1.10 to 1.20)", "0.250"]
    assert line.endswith("| 2.200 | 0.00 | 1.100 |")


def test_every_row_is_measured_at_every_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(repeats=1, iterations=2, results=tmp_path)
    report = orjson.loads((tmp_path / "overhead-digits.json").read_bytes())
    assert report["command"] == "python -m benchmarks.overhead --repeats 1 --iterations 2"
    assert report["rounds"].keys() == ROWS.keys()
    for each in report["rounds"].values():
        (only,) = each  # the first one, which warms up, does not count
        assert 0 < sum(only["places"].values()) < only["processor"]
        assert min(only["places"].values()) > 0
        assert only["bytes"] > 0
    size = {name: each[0]["bytes"] for name, each in report["rounds"].items()}
    # what is only weighed otherwise is sent alike; who asks, shares or aligns sends more
    assert size["SuperSFL, by samples"] == size["SuperSFL"]
    assert size["SplitFedV2"] == size[REFERENCE]
    assert size["HARMONY"] > size["HARMONY, no alignment"] > size[REFERENCE]
    text = (tmp_path / "overhead-digits.md").read_text()
    assert all(f"| {part.method} | {part.name} |" in text for part in PARTS)
    assert capsys.readouterr().out.strip().endswith(text.rpartition("\n\n")[2].strip())

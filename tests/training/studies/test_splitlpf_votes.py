"""The count of votes lost, where it is known: nobody loses one if no direction counts."""

from __future__ import annotations

from benchmarks.paper.splitlpf_votes import lost_votes


def test_nobody_loses_a_vote_where_no_direction_counts() -> None:
    # sizes of 55 to 440 samples: by samples alone, all have a vote
    assert lost_votes("uds", 1.0, 2) == 0

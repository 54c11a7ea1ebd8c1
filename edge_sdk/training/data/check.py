"""Reading of labelled samples in a process of its own: `python -P -m edge_sdk.training.data.check`.

It prints one line: what it read, or why nobody can train on it.
"""

from __future__ import annotations

import sys
from typing import Final

from edge_sdk.errors import SplitedgeError
from edge_sdk.training.data.load import described, labelled_dataset, open_data

REFUSED: Final = 2


def main(text: str) -> int:
    """Read the samples that a word names and print the line.

    Returns: the exit status, REFUSED where they cannot be trained on.
    """
    try:
        samples = open_data(text)
        sizes = labelled_dataset(samples).sizes
    except SplitedgeError as err:
        line, status = " ".join(str(err).split()), REFUSED
    else:
        line, status = described(samples, sizes), 0
    sys.stdout.write(f"{line}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

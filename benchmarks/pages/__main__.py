"""Write the measured figures into docs/methods and docs/index.md, and draw the curves.

python -m benchmarks.pages
"""

from __future__ import annotations

import sys

from benchmarks.pages import front
from benchmarks.pages.measured import rewrite
from benchmarks.reports import ROOT
from edge_sdk.errors import SplitedgeError

if __name__ == "__main__":
    try:
        changed = rewrite()
    except SplitedgeError as err:
        sys.exit(f"error: {err}")
    changed += [front.PAGE] if front.rewrite() else []
    lines = [str(path.relative_to(ROOT)) for path in changed]
    print("\n".join(lines) if lines else "nothing has changed")

"""All tables, paper by paper.

Those with another network, other data or fewer rounds than the paper, as their titles say, have the
full scale alone: two cores can train them in hours. The table `repeated` has the smallest alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.paper.tables import besplit, harmony, ours, scala, splitlpf, supersfl
from benchmarks.paper.tables.table import Table

TABLES: Final[Mapping[str, Table]] = {
    **ours.TABLES,
    **supersfl.TABLES,
    **besplit.TABLES,
    **scala.TABLES,
    **harmony.TABLES,
    **splitlpf.TABLES,
}

"""Draft the next migration: `python -m server.registry.migrations "what changes"`.

The tables of schema.py are compared with those that the existing migrations make in an empty
database; the difference is written as the next version. Read it before you commit it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.script import ScriptDirectory

from server.registry.connect import open_engine
from server.registry.migrate import alembic_config, migrate


def main() -> None:
    """Write the draft into versions/."""
    if len(sys.argv) != 2:
        raise SystemExit('usage: python -m server.registry.migrations "what changes"')
    config = alembic_config()
    config.set_main_option("file_template", "v%%(rev)s_%%(slug)s")
    number = len(list(ScriptDirectory.from_config(config).walk_revisions())) + 1
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{Path(folder)}/empty.db")
        migrate(engine)
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.revision(config, sys.argv[1], autogenerate=True, rev_id=f"{number:04d}")
        engine.dispose()


if __name__ == "__main__":
    main()

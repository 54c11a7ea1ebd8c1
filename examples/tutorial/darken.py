"""Write pictures with a quarter of their light, as a camera takes them at dusk.

    python darken.py FROM TO

FROM is a folder of PNG files. At most 400 of them are written to TO.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

LIGHT = 0.25
MOST = 400


def main() -> None:
    """Read, darken, write."""
    parser = argparse.ArgumentParser(description="Take light out of pictures.")
    parser.add_argument("source", type=Path, help="folder with PNG files")
    parser.add_argument("target", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    found = sorted(arguments.source.glob("*.png"))[:MOST]
    for path in found:
        with Image.open(path) as picture:
            dark = picture.convert("L").point(lambda value: LIGHT * value)
        dark.save(arguments.target / path.name)
    print(f"{arguments.target}: {len(found)} pictures")


if __name__ == "__main__":
    main()

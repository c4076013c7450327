"""Draw results/<gpu>/linear.json as `cufp8 bench --plot` draws what it measures.

python benchmarks/plot.py [--gpu h200] [--out picture.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import table

from cufp8.bench import results
from cufp8.bench.plot import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", default="h200", help="a folder of results/")
    parser.add_argument("--results", type=Path, default=table.FOLDER)
    parser.add_argument("--out", type=Path, help="default: beside the JSON file")
    options = parser.parse_args()
    source = options.results / options.gpu / "linear.json"
    data = results.load(source)
    if data is None:
        parser.error(f"there is no {source}")
    draw(data, options.out or source.with_suffix(".png"))


if __name__ == "__main__":
    main()

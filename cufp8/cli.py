"""The command line: `cufp8 info`, `cufp8 demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from cufp8 import __version__, runtime


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        Exit code: 0, or 1 after one sentence on stderr.

    Raises
    ------
    SystemExit
        With code 2 for arguments that do not parse, with 0 after `--help` and `--version`.
    """
    parser = argparse.ArgumentParser(
        prog="cufp8",
        description="Linear layers with FP8 weights, on CUDA kernels compiled where they run.",
    )
    parser.add_argument("--version", action="version", version=f"cufp8 {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    info = commands.add_parser("info", help="what this machine offers, and which kernels serve it")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    demo = commands.add_parser("demo", help="quantise the layers of a model; compare and time them")
    demo.add_argument("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    demo.add_argument(
        "--synthetic",
        action="store_true",
        help="random layers of a language model's shapes, even if a real model is installed",
    )
    demo.set_defaults(run=_demo)

    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"cufp8: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell reports for a process that Ctrl-C ended


def _info(args: argparse.Namespace) -> int:
    facts = runtime.info()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table.grid(padding=(0, 2))
    for name in ("version", "gpu", "arch", "driver", "cuda", "nvrtc", "cupy"):
        table.add_row(name, "none" if facts[name] is None else str(facts[name]))
    table.add_row("cache", f"{facts['cache_dir']} ({facts['cache_bytes'] / 1e6:.1f} MB)")
    for name, digest in facts["sources"].items():
        served = {None: "", True: ", serves this GPU", False: ", not on this GPU"}
        table.add_row(f"sources of {name}", digest[:12] + served[facts["kernels"].get(name)])
    console.print(table)
    if facts["why_not"]:
        console.print(f"No GPU is used: {facts['why_not']}")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from cufp8 import demo

    return demo.run(device=args.device, synthetic=args.synthetic)

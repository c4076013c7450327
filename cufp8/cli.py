"""The command line: `cufp8 info`, `cufp8 demo`, `cufp8 bench`, `cufp8 inspect`, `cufp8 check`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cufp8 import __version__, runtime

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
ROWS = [1, 4, 16, 32, 64, 256, 1024]


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

    bench = commands.add_parser("bench", help="time linear layers on this GPU, beside F.linear if torch is here")
    bench.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        metavar="NxK",
        default=SHAPES,
        help=f"outputs x inputs of the weights (default: {' '.join(f'{n}x{k}' for n, k in SHAPES)})",
    )
    bench.add_argument(
        "--m",
        nargs="+",
        type=_count,
        metavar="M",
        default=ROWS,
        help=f"rows of x (default: {' '.join(map(str, ROWS))})",
    )
    bench.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="of x (default: bfloat16)")
    bench.add_argument("--no-torch", action="store_true", help="do not import torch: no comparison with F.linear")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all results, as in benchmarks/results")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw TB/s over M (.png, .svg, ...; needs matplotlib)")
    bench.set_defaults(run=_bench)

    inspect = commands.add_parser("inspect", help="what a quantised checkpoint holds, and what serves it here")
    check = commands.add_parser("check", help="look for what is wrong with a quantised checkpoint; 1 on an error")
    for command, does in ((inspect, _inspect), (check, _check)):
        command.add_argument(
            "path", type=Path, metavar="PATH", help="safetensors file, folder, or folder of the hub's cache"
        )
        command.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="GLOB",
            help="modules to leave out, such as '*.lm_head'; once for each pattern",
        )
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=does)

    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
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


def _bench(args: argparse.Namespace) -> int:
    from cufp8.bench import command

    return command.run(args.shapes, args.m, dtype=args.dtype, torch=not args.no_torch, json=args.json, plot=args.plot)


def _inspect(args: argparse.Namespace) -> int:
    from cufp8.checkpoint import CheckpointError, load, show

    try:
        with load(args.path, ignore=args.ignore) as checkpoint:
            return show.inspect(checkpoint, json=args.json)
    except CheckpointError as error:
        if not args.json:
            raise
        print(json.dumps({"path": str(args.path), "error": str(error)}, indent=2))
        return 1


def _check(args: argparse.Namespace) -> int:
    from cufp8.checkpoint import show

    return show.check(args.path, ignore=args.ignore, json=args.json)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; needed is a number from 1 on")
    return int(text)


def _shape(text: str) -> tuple[int, int]:
    n, by, k = text.lower().partition("x")
    if not by or not (n.isdecimal() and k.isdecimal() and int(n) and int(k)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; needed is N x K without spaces, such as 14336x4096")
    if int(n) * int(k) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} is too small to be measured cold; needed are 2^20 weights or more")
    return int(n), int(k)

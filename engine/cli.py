"""The `thimble` command: fetch, convert, inspect and use models without a service.

Results go to standard output, everything else to standard error. Exit status: 0 done, 1 failed, 2 wrong call. Engine
modules are imported inside the commands: the number of BLAS threads must stand in the environment before NumPy loads.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from engine.cli_bench import bench
from engine.cli_compare import COMPARISONS, compare
from engine.cli_decoding import add_decoding_options
from engine.cli_models import add_model_commands
from engine.cli_plan import plan, size
from engine.cli_recordings import FORMATS, one_line, say, silence_closed_output, transcribe, wer
from engine.errors import EngineError, FetchFailed, InvalidOptions

WEIGHTS = ("int8", "f16", "f32")
KV = ("int8", "f32", "shared-int8", "shared-f32", "int8-half")
RESIDENCY = ("resident", "stream")
TAIL = ("merged", "whole")


def data_directory() -> Path:
    """`THIMBLE_DATA_DIR`, or the place for a user's data (XDG Base Directory Specification)."""
    named = os.environ.get("THIMBLE_DATA_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "thimble"


def _fetch(args: argparse.Namespace) -> None:
    from engine.fetch import fetch
    from engine.published import MODELS, model_directory

    if args.name not in MODELS:
        raise FetchFailed(f"no published model is called {args.name!r}; known: {', '.join(MODELS)}")
    directory = model_directory(args.dir or data_directory() / "models", args.name, args.weights)
    fetched = fetch(args.name, directory, args.weights, args.hub_endpoint, say)
    say(f"{args.name} ({args.weights}) is {'now' if fetched else 'already'} in {directory}")


def _transcribe(args: argparse.Namespace) -> None:
    transcribe(args, data_directory() / "models")


def _plan(args: argparse.Namespace) -> None:
    plan(args, data_directory() / "models")


def _bench(args: argparse.Namespace) -> None:
    (compare if args.compare else bench)(args, data_directory() / "models")


def _wer(args: argparse.Namespace) -> None:
    wer(args, data_directory() / "models")


def _comparisons(text: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    if strangers := set(names) - set(COMPARISONS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(strangers))}: known are {', '.join(COMPARISONS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    environment = os.environ
    parser = argparse.ArgumentParser(prog="thimble", description="Speech-to-text that fits in a thimble.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    weights: dict[str, Any] = {"choices": WEIGHTS, "default": environment.get("THIMBLE_WEIGHTS", "int8")}

    fetch = commands.add_parser("fetch", help="download a published model, verify and convert it")
    fetch.add_argument("name", help="tiny.en or base")
    fetch.add_argument("--dir", type=Path, help="directory of models (default: models in the data directory)")
    fetch.add_argument("--weights", **weights)
    hub = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    fetch.add_argument("--hub-endpoint", default=hub, help="the hub, or a mirror of it (default: HF_ENDPOINT)")
    fetch.set_defaults(run=_fetch)

    add_model_commands(commands, weights)

    foresee = commands.add_parser("plan", help="say what a model costs within a memory budget, before it runs")
    foresee.add_argument("name", metavar="MODEL", help="a name or a directory")
    budget = environment.get("THIMBLE_MEMORY_BUDGET") or None
    foresee.add_argument("--budget", type=size, default=budget, help="memory of the whole process: 90M (default: what is left)")
    foresee.add_argument("--read-bps", type=size, help="what the storage reads a second: 50M")
    times = "what bench --json printed of a recording: say how long the same would take"
    foresee.add_argument("--times", type=Path, metavar="FILE", help=times)
    foresee.add_argument("--weights", **weights)
    _add_kv_option(foresee)
    foresee.add_argument("--json", action="store_true")
    foresee.set_defaults(run=_plan)

    heard: dict[str, Any] = {"parents": [_model_options(weights)]}
    hear = commands.add_parser("transcribe", help="print what is said in recordings", **heard)
    hear.add_argument("files", nargs="+", type=Path, metavar="FILE")
    hear.add_argument("--format", choices=FORMATS, default="txt")
    hear.add_argument("--beside", action="store_true", help="write each result beside its recording, not to standard output")
    add_decoding_options(hear)
    hear.set_defaults(run=_transcribe)

    measure = commands.add_parser("bench", help="show where the seconds and the bytes of a recording go", **heard)
    measure.add_argument(
        "audio", type=Path, metavar="AUDIO", help="a recording, or a manifest of several as wer takes it (.jsonl)"
    )
    measure.add_argument(
        "--cold", action="store_true", help="let the kernel forget the model's files before, but for loading it"
    )
    comparisons = ",".join(COMPARISONS)
    measure.add_argument("--compare", type=_comparisons, default=(), help=f"tables of several ways to run: {comparisons}")
    measure.add_argument("--json", action="store_true")
    add_decoding_options(measure)
    measure.set_defaults(run=_bench)

    rate = commands.add_parser("wer", help="error rates over recordings with transcripts", **heard)
    rate.add_argument("manifest", type=Path, help="a JSON object a line: path, text, and set, language")
    rate.add_argument("--sets", default="", help="names of sets, with commas between (default: all)")
    rate.add_argument("--json", action="store_true")
    add_decoding_options(rate)
    rate.set_defaults(run=_wer)
    return parser


def _model_options(weights: dict[str, Any]) -> argparse.ArgumentParser:
    """Options of the commands that load a model."""
    environment = os.environ
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--model", default=environment.get("THIMBLE_MODEL", "tiny.en"), help="a name or a directory")
    options.add_argument("--weights", **weights)
    _add_kv_option(options)
    ways = options.add_mutually_exclusive_group()
    residency = environment.get("THIMBLE_RESIDENCY")
    ways.add_argument("--residency", choices=RESIDENCY, default=residency, help="keep shards mapped, or stream them")
    budget = environment.get("THIMBLE_MEMORY_BUDGET") or None
    ways.add_argument(
        "--budget", type=size, default=budget, help="memory of the whole process, as 90M: how to run follows (what is left)"
    )
    tail = environment.get("THIMBLE_TAIL", "merged")
    options.add_argument("--tail", choices=TAIL, default=tail, help="merge the silence behind short sound, or compute it whole")
    options.add_argument("--threads", type=int, default=environment.get("THIMBLE_THREADS", "1"), help="BLAS threads")
    return options


def _add_kv_option(options: argparse.ArgumentParser) -> None:
    kv = os.environ.get("THIMBLE_KV")
    options.add_argument("--kv", choices=KV, default=kv, help="what the decoder keeps of a window, and how (int8)")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments, argparse.Namespace(arguments=sys.argv[1:] if arguments is None else arguments))
    for name, choices in (("weights", WEIGHTS), ("kv", KV), ("residency", RESIDENCY), ("tail", TAIL)):
        if getattr(args, name, None) not in (None, *choices):  # argparse does not check what comes from the environment
            parser.error(f"THIMBLE_{name.upper()} is one of {', '.join(choices)}")
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(getattr(args, "threads", 1))
    try:
        args.run(args)
    except InvalidOptions as error:
        parser.error(str(error))
    except BrokenPipeError:
        silence_closed_output()
        return 1
    except (EngineError, OSError) as error:
        say(f"thimble: {one_line(error)}")
        return 1
    except SystemExit as stop:
        say(str(stop.code))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

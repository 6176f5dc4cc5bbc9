"""The `thimble` command: fetch, convert, inspect and use models without a service.

Results go to standard output, everything else to standard error. Exit status: 0 done, 1 failed, 2 wrong call. Engine
modules are imported inside the commands: the number of BLAS threads must stand in the environment before NumPy loads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import EngineError, FetchFailed

WEIGHTS = ("int8", "f16", "f32")
KV = ("int8", "f32")
RESIDENCY = ("resident", "stream")


def data_directory() -> Path:
    """`THIMBLE_DATA_DIR`, or the place for a user's data (XDG Base Directory Specification)."""
    named = os.environ.get("THIMBLE_DATA_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "thimble"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fetch(args: argparse.Namespace) -> None:
    from engine.fetch import fetch
    from engine.published import MODELS, model_directory

    if args.name not in MODELS:
        raise FetchFailed(f"no published model is called {args.name!r}; known: {', '.join(MODELS)}")
    directory = model_directory(args.dir or data_directory() / "models", args.name, args.weights)
    fetched = fetch(args.name, directory, args.weights, args.hub_endpoint, _say)
    _say(f"{args.name} ({args.weights}) is {'now' if fetched else 'already'} in {directory}")


def _convert(args: argparse.Namespace) -> None:
    from engine.checkpoints import open_checkpoint
    from engine.convert import convert

    manifest = convert(open_checkpoint(args.source), args.directory, args.weights, _say)
    _say(f"{args.directory}: {manifest.n_bytes / 1e6:.1f} MB in {len(manifest.files)} files")


def _inspect(args: argparse.Namespace) -> None:
    from engine.shards.manifest import read_manifest, verify

    manifest = read_manifest(args.directory)
    verify(args.directory, manifest)
    if args.json:
        print(json.dumps(manifest.to_json() | {"bytes": manifest.n_bytes, "verified": True}))
        return
    print(f"checkpoint {manifest.checkpoint}")
    print(f"source     {manifest.source['format']}")
    print(f"weights    {manifest.weights}, {manifest.n_bytes / 1e6:.1f} MB")
    print("dims       " + ", ".join(f"{name} {value}" for name, value in manifest.dims.to_json().items()))
    print(f"{'file':34} {'layers':>10} {'tensors':>8} {'MB':>8}")
    for file in manifest.files:
        layers = f"[{file.start}, {file.end})" if file.part == "layers" else file.part
        print(f"{file.file:34} {layers:>10} {len(file.tensors):8} {file.n_bytes / 1e6:8.2f}")
    print("every size, header and SHA-256 is the manifest's")


def _transcribe(args: argparse.Namespace) -> None:
    from engine.decoding import DecodingOptions
    from engine.published import find_model
    from engine.timings import LayerTimings
    from engine.transcribe import Engine

    directory = find_model(data_directory() / "models", args.model, args.weights)
    engine = Engine(directory, args.kv, args.residency)
    failed = 0
    for path in args.files:
        timings = LayerTimings()
        try:
            transcript = engine.transcribe(path, timings, DecodingOptions(args.language))
        except (EngineError, OSError) as error:
            failed += 1
            _say(_one_line(error) if isinstance(error, OSError) else f"{path}: {_one_line(error)}")
            continue
        if args.format == "txt":
            print(transcript.text.strip(), flush=True)
        else:
            row: dict[str, Any] = {"file": str(path)} | asdict(transcript) | {"timings": timings.to_json()}
            print(json.dumps(row, ensure_ascii=False), flush=True)
    if failed:
        raise SystemExit(f"thimble: {failed} of {len(args.files)} files failed")


def _one_line(error: Exception) -> str:
    if isinstance(error, EngineError):
        return f"{error} [{error.code}]"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


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

    convert = commands.add_parser("convert", help="turn a checkpoint's directory into a model directory")
    convert.add_argument("source", type=Path, help="Hugging Face safetensors or CTranslate2, with tokenizer.json")
    convert.add_argument("directory", type=Path)
    convert.add_argument("--weights", **weights)
    convert.set_defaults(run=_convert)

    inspect = commands.add_parser("inspect", help="show a model directory and verify every file in it")
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_inspect)

    transcribe = commands.add_parser("transcribe", help="print what is said in recordings")
    transcribe.add_argument("files", nargs="+", type=Path, metavar="FILE")
    transcribe.add_argument("--model", default=environment.get("THIMBLE_MODEL", "tiny.en"), help="a name or a directory")
    transcribe.add_argument("--weights", **weights)
    transcribe.add_argument("--kv", choices=KV, default=environment.get("THIMBLE_KV", "int8"))
    residency = environment.get("THIMBLE_RESIDENCY", "resident")
    transcribe.add_argument("--residency", choices=RESIDENCY, default=residency, help="keep shards mapped, or one at a time")
    transcribe.add_argument("--threads", type=int, default=environment.get("THIMBLE_THREADS", "1"), help="BLAS threads")
    transcribe.add_argument("--language", help="code or English name (default: detect)")
    transcribe.add_argument("--format", choices=("txt", "json"), default="txt")
    transcribe.set_defaults(run=_transcribe)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    for name, choices in (("weights", WEIGHTS), ("kv", KV), ("residency", RESIDENCY)):
        if getattr(args, name, choices[0]) not in choices:  # argparse does not check what comes from the environment
            parser.error(f"THIMBLE_{name.upper()} is one of {', '.join(choices)}")
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(getattr(args, "threads", 1))
    try:
        args.run(args)
    except (EngineError, OSError) as error:
        _say(f"thimble: {_one_line(error)}")
        return 1
    except SystemExit as stop:
        _say(str(stop.code))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

"""The commands that write and show model directories: `thimble convert`, `thimble reshard` and `thimble inspect`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli_recordings import say

if TYPE_CHECKING:
    from engine.checkpoints import Checkpoint
    from engine.shards.manifest import Manifest


def add_model_commands(commands: Any, weights: dict[str, Any]) -> None:
    """Add them to `commands`, as `argparse` makes it; `weights` is how `--weights` is read."""
    convert = commands.add_parser("convert", help="turn a checkpoint's directory into a model directory")
    convert.add_argument(
        "source", help="Hugging Face safetensors or CTranslate2, with tokenizer.json; or with --random, a size"
    )
    convert.add_argument("directory", type=Path)
    convert.add_argument("--weights", **weights)
    convert.add_argument(
        "--keep", action="append", default=[], metavar="DTYPE:LAYERS", help="store layers finer, as in f16:decoder.0,encoder.3"
    )
    convert.add_argument("--layers-per-shard", type=layers_per_shard, metavar="N|all", help="layers in one file (default: 2)")
    convert.add_argument("--random", action="store_true", help="random weights of a size of Whisper, for measuring memory")
    convert.set_defaults(run=_convert)

    reshard = commands.add_parser("reshard", help="cut a model directory into other shards")
    reshard.add_argument("source", type=Path, metavar="directory")
    reshard.add_argument("directory", type=Path, metavar="out")
    reshard.add_argument("--layers-per-shard", type=layers_per_shard, metavar="N|all", required=True, help="layers in one file")
    reshard.set_defaults(run=_reshard)

    inspect = commands.add_parser("inspect", help="show a model directory and verify every file in it")
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_inspect)


def layers_per_shard(text: str) -> int:
    """Layers per shard; `all` is more than any model has."""
    number = sys.maxsize if text == "all" else int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of layers, 1 or more, nor all")
    return number


def _convert(args: argparse.Namespace) -> None:
    from engine.convert import convert
    from engine.shards.precision import parse_keep
    from engine.shards.writer import DEFAULT_LAYERS_PER_SHARD

    keep = parse_keep(args.keep)
    layers_per_shard = args.layers_per_shard or DEFAULT_LAYERS_PER_SHARD
    checkpoint = _checkpoint(args.source, args.random)
    _say_written(args.directory, convert(checkpoint, args.directory, args.weights, keep, layers_per_shard, say))


def _checkpoint(source: str, is_random: bool) -> Checkpoint:
    if is_random:
        from engine.checkpoints.random_weights import RandomCheckpoint

        return RandomCheckpoint(source)
    from engine.checkpoints import open_checkpoint

    return open_checkpoint(Path(source))


def _reshard(args: argparse.Namespace) -> None:
    from engine.reshard import reshard

    _say_written(args.directory, reshard(args.source, args.directory, args.layers_per_shard, say))


def _say_written(directory: Path, manifest: Manifest) -> None:
    say(f"{directory}: {manifest.n_bytes / 1e6:.1f} MB in {len(manifest.files)} files")


def _inspect(args: argparse.Namespace) -> None:
    from engine.shards.manifest import read_manifest, verify
    from engine.shards.precision import kept_layers
    from engine.shards.store import check_tensors

    manifest = read_manifest(args.directory)
    check_tensors(manifest)
    verify(args.directory, manifest)
    kept = {layer: "+".join(sorted(dtypes)) for layer, dtypes in kept_layers(manifest).items()}
    if args.json:
        print(json.dumps(manifest.to_json() | {"bytes": manifest.n_bytes, "kept": kept, "verified": True}))
        return
    print(f"checkpoint {manifest.checkpoint}")
    print(f"source     {manifest.source['format']}")
    print(f"weights    {manifest.weights}, {manifest.n_bytes / 1e6:.1f} MB")
    if kept:
        print("kept       " + ", ".join(f"{layer} {dtypes}" for layer, dtypes in kept.items()))
    print("dims       " + ", ".join(f"{name} {value}" for name, value in manifest.dims.to_json().items()))
    print(f"{'file':34} {'layers':>10} {'tensors':>8} {'MB':>8}")
    for file in manifest.files:
        layers = f"[{file.start}, {file.end})" if file.part == "layers" else file.part
        print(f"{file.file:34} {layers:>10} {len(file.tensors):8} {file.n_bytes / 1e6:8.2f}")
    print("every size, header and SHA-256 is the manifest's")

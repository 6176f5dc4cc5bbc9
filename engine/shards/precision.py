"""Mixed precision: in which dtype each tensor is stored, by the model's weights and the layers that are kept finer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.checkpoints.layout import expected_shapes
from engine.dims import ModelDimensions
from engine.errors import InvalidOptions
from engine.shards.manifest import WEIGHTS, Manifest
from engine.shards.pieces import layer_of

Keep = Mapping[str, str]
"""Layer, as `decoder.0`, `encoder.stem` or `decoder.embedding` → one of `WEIGHTS`, finer than the model's own."""

_DTYPES = {"f32": "F32", "f16": "F16", "int8": "I8"}
_WEIGHTS = {dtype: weights for weights, dtype in _DTYPES.items()}


def stored_dtype(name: str, rank: int, weights: str, keep: Keep) -> str:
    """The dtype (safetensors' name) that tensor `name` is stored in.

    Vectors are float32 whatever is asked: biases and norms. Convolutions and position encodings are used whole, not in
    rows of blocks, so they are float16 where the matrices are INT8.
    """
    asked = keep.get(layer_name(name), weights)
    if rank == 1:
        return "F32"
    is_matrix = rank == 2 and not name.endswith("positional_embedding")
    return "F16" if asked == "int8" and not is_matrix else _DTYPES[asked]


def layer_name(tensor: str) -> str:
    """The layer of a tensor, as `--keep` names it: `encoder.stem`, `encoder.0`, `decoder.embedding`."""
    return ".".join(layer_of(tensor)[0])


def parse_keep(texts: Iterable[str]) -> dict[str, str]:
    """Read `--keep` as it is written, `f16:decoder.0,encoder.3`, given any number of times.

    Raises
    ------
    InvalidOptions
        One is not of that form, or a layer is named twice.
    """
    keep: dict[str, str] = {}
    for text in texts:
        weights, colon, layers = text.partition(":")
        if not colon or not layers:
            raise InvalidOptions(f"keep {text!r}: expected a dtype, a colon and layers, as in f16:decoder.0,encoder.3")
        for layer in layers.split(","):
            if layer in keep:
                raise InvalidOptions(f"keep names {layer} twice")
            keep[layer] = weights
    return keep


def check_keep(keep: Keep, weights: str, dims: ModelDimensions) -> None:
    """Compare what is to be kept with what the model has.

    Raises
    ------
    InvalidOptions
        A dtype is unknown, a layer is none of this model's with matrices, or would be no finer than without.
    """
    without = _layer_dtypes({name: stored_dtype(name, len(shape), weights, {}) for name, shape in _matrices(dims)})
    for layer, asked in keep.items():
        if asked not in WEIGHTS:
            raise InvalidOptions(f"keep {asked}:{layer}: a dtype is one of {', '.join(WEIGHTS)}")
        if layer not in without:
            known = (
                f"encoder.stem, encoder.0 to {dims.n_audio_layer - 1}, decoder.0 to {dims.n_text_layer - 1}, decoder.embedding"
            )
            raise InvalidOptions(f"keep {asked}:{layer}: this model has {known}")
        coarsest = max(without[layer], key=WEIGHTS.index)
        if WEIGHTS.index(asked) >= WEIGHTS.index(coarsest):
            raise InvalidOptions(f"keep {asked}:{layer}: with weights {weights} it is {coarsest} already; name a finer dtype")


def kept_layers(manifest: Manifest) -> dict[str, set[str]]:
    """Layers of a model that are not stored as its `weights` say, each with what its matrices are stored in."""
    found = {name: dtype for file in manifest.files for name, (dtype, _) in file.tensors.items()}
    names = [(name, len(shape)) for name, shape in _matrices(manifest.dims)]
    plain = _layer_dtypes({name: stored_dtype(name, rank, manifest.weights, {}) for name, rank in names})
    stored = _layer_dtypes({name: found[name] for name, _ in names})
    return {layer: dtypes for layer, dtypes in stored.items() if dtypes != plain[layer]}


def _matrices(dims: ModelDimensions) -> list[tuple[str, tuple[int, ...]]]:
    """All tensors but the vectors."""
    return [(name, shape) for name, shape in expected_shapes(dims).items() if len(shape) > 1]


def _layer_dtypes(tensors: Mapping[str, str]) -> dict[str, set[str]]:
    """What each layer is stored in, in the words of `WEIGHTS`."""
    layers: dict[str, set[str]] = {}
    for name, dtype in tensors.items():
        layers.setdefault(layer_name(name), set()).add(_WEIGHTS[dtype])
    return layers

"""What a checkpoint must hold: OpenAI's tensor names and the shapes that the dimensions fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.dims import CONV_WIDTH, ModelDimensions
from engine.errors import CheckpointInvalid

MAX_NAMES_IN_A_MESSAGE = 8


def expected_shapes(dims: ModelDimensions) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Whisper of these dimensions: OpenAI's name → shape, in the order the data travels."""
    state, mlp = dims.n_audio_state, 4 * dims.n_audio_state
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (state, dims.n_mels, CONV_WIDTH),
        "encoder.conv1.bias": (state,),
        "encoder.conv2.weight": (state, state, CONV_WIDTH),
        "encoder.conv2.bias": (state,),
        "encoder.positional_embedding": (dims.n_audio_ctx, state),
    }
    for layer in range(dims.n_audio_layer):
        shapes.update(_block(f"encoder.blocks.{layer}", state, mlp, ["attn"]))
    shapes.update(_norm("encoder.ln_post", state))
    shapes["decoder.token_embedding.weight"] = (dims.n_vocab, state)
    shapes["decoder.positional_embedding"] = (dims.n_text_ctx, state)
    for layer in range(dims.n_text_layer):
        shapes.update(_block(f"decoder.blocks.{layer}", state, mlp, ["attn", "cross_attn"]))
    shapes.update(_norm("decoder.ln", state))
    return shapes


def check_layout(found: Mapping[str, tuple[int, ...]], dims: ModelDimensions) -> None:
    """Compare a checkpoint's tensors with `expected_shapes`.

    Raises
    ------
    CheckpointInvalid
        Naming what is missing, extra or misshapen.
    """
    expected = expected_shapes(dims)
    faults = [
        ("missing", sorted(expected.keys() - found.keys())),
        ("unknown", sorted(found.keys() - expected.keys())),
        ("misshapen", [f"{n} {found[n]} for {s}" for n, s in expected.items() if n in found and found[n] != s]),
    ]
    text = "; ".join(f"{kind}: {_listed(names)}" for kind, names in faults if names)
    if text:
        raise CheckpointInvalid(f"the checkpoint's tensors are not those of a Whisper model: {text}")


def alignment_heads(value: object, dims: ModelDimensions) -> tuple[tuple[int, int], ...]:
    """The heads of cross-attention that follow the sound, as (layer, head), from a checkpoint's own list.

    Where it has none (None), all heads of the later half of the layers (openai/whisper model.py).

    Raises
    ------
    CheckpointInvalid
        The list is none of pairs, empty, or names a head that the model has not.
    """
    if value is None:
        later = range(dims.n_text_layer // 2, dims.n_text_layer)
        return tuple((layer, head) for layer in later for head in range(dims.n_text_head))
    pairs = value if isinstance(value, list) else []
    if not pairs or not all(isinstance(pair, list) and [type(n) for n in pair] == [int, int] for pair in pairs):
        raise CheckpointInvalid("alignment_heads is no list of [layer, head]")
    if any(not (0 <= layer < dims.n_text_layer and 0 <= head < dims.n_text_head) for layer, head in pairs):
        raise CheckpointInvalid(f"alignment_heads names a head beyond {dims.n_text_layer} layers of {dims.n_text_head}")
    return tuple(sorted({(layer, head) for layer, head in pairs}))


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_IN_A_MESSAGE
    return ", ".join(names[:MAX_NAMES_IN_A_MESSAGE]) + (f" and {more} more" if more > 0 else "")


def _norm(name: str, state: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (state,)
    yield f"{name}.bias", (state,)


def _block(name: str, state: int, mlp: int, attentions: list[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for attention in attentions:
        yield from _norm(f"{name}.{attention}_ln", state)
        for part in ("query", "key", "value", "out"):
            yield f"{name}.{attention}.{part}.weight", (state, state)
            if part != "key":  # the key projection has no bias: softmax does not see it
                yield f"{name}.{attention}.{part}.bias", (state,)
    yield from _norm(f"{name}.mlp_ln", state)
    yield f"{name}.mlp.0.weight", (mlp, state)
    yield f"{name}.mlp.0.bias", (mlp,)
    yield f"{name}.mlp.2.weight", (state, mlp)
    yield f"{name}.mlp.2.bias", (state,)

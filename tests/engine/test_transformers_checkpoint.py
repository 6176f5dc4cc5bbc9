"""The Hugging Face reader against the library whose files it reads: what `transformers` saves, and what it computes from it.

Needs torch and transformers, which the project does not install (pip install torch transformers); skipped without them.
Everything else in tests/ writes such checkpoints by the reader's own tables, so only this file notices where those are wrong.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.checkpoints.layout import expected_shapes
from engine.convert import convert
from engine.dims import ModelDimensions
from engine.model import Whisper
from engine.shards.store import ShardStore
from engine.tail import whole
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers
    from transformers import WhisperForConditionalGeneration

# Both libraries are imported in fixtures: a default run does not spend seconds on them, and these marks then cover what they
# warn of while they are imported. Warnings of the engine stay errors.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::torch", "ignore:::transformers")]

TOLERANCE = 1e-4
"""Of audio features and logits, both of order one: float32 sums in another order, and our GELU's 1.5e-7."""

MERGES = [("h", "e"), ("Ġ", "t"), ("Ġt", "he")]
EOT = 256 + len(MERGES)
NAMES = "endoftext startoftranscript en translate transcribe startoflm startofprev nospeech notimestamps"
SPECIAL = [f"<|{name}|>" for name in NAMES.split()]
TIMESTAMPS = [f"<|{0.02 * i:.2f}|>" for i in range(61)]
SUPPRESSED = [1, 2, 7]

# Encoder and decoder differ wherever they may, so that neither's number passes for the other's.
_AUDIO = {"n_mels": 80, "n_audio_ctx": 60, "n_audio_state": 128, "n_audio_head": 4, "n_audio_layer": 2}
_TEXT = {"n_text_ctx": 64, "n_text_state": 128, "n_text_head": 2, "n_text_layer": 3}
DIMS = ModelDimensions(n_vocab=EOT + len(SPECIAL) + len(TIMESTAMPS), **_AUDIO, **_TEXT)

# The two naming schemes once more, read off transformers' modeling_whisper.py and openai/whisper's model.py.
PARTS = {"mlp.0": "fc1", "mlp.2": "fc2", "mlp_ln": "final_layer_norm"}
for _ours, _theirs in (("attn", "self_attn"), ("cross_attn", "encoder_attn")):
    PARTS |= {f"{_ours}_ln": f"{_theirs}_layer_norm", f"{_ours}.out": f"{_theirs}.out_proj"}
    PARTS |= {f"{_ours}.{name}": f"{_theirs}.{name[0]}_proj" for name in ("query", "key", "value")}
TOP = {"positional_embedding": "embed_positions.weight", "token_embedding.weight": "embed_tokens.weight"}
TOP |= {f"{norm}.{kind}": f"layer_norm.{kind}" for norm in ("ln_post", "ln") for kind in ("weight", "bias")}


def their_name(name: str) -> str:
    """The name in the library's state_dict of what OpenAI calls `name`."""
    stack, _, rest = name.partition(".")
    if not rest.startswith("blocks."):
        return f"model.{stack}.{TOP.get(rest, rest)}"
    _, layer, part = rest.split(".", 2)
    module, _, kind = part.rpartition(".")
    return f"model.{stack}.layers.{layer}.{PARTS[module]}.{kind}"


@dataclass(frozen=True)
class Form:
    """A way to save: in which numbers, in files of what size, and whether the inner WhisperModel alone."""

    dtype: str = "float32"
    max_file_size: str = "1GB"
    inner: bool = False


SMALL = "200KB"
FORMS = {
    "one file": Form(),
    "several files": Form(max_file_size=SMALL),
    "float16": Form("float16"),
    "bfloat16 in several files": Form("bfloat16", SMALL),
    "WhisperModel": Form(inner=True),  # whose tensor names lack the leading `model.`
}


@dataclass(frozen=True)
class Saved:
    """A directory that the library wrote, and the model, in float32, that it wrote there."""

    form: Form
    directory: Path
    model: WhisperForConditionalGeneration


def needed(library: str) -> Any:
    return pytest.importorskip(library, reason=f"needs {library}: pip install torch transformers")


def random_model() -> WhisperForConditionalGeneration:
    """Seeded, and random in every tensor: the library's zero biases and unit norms would hide one taken for another."""
    torch, transformers = needed("torch"), needed("transformers")
    config = transformers.WhisperConfig(
        num_mel_bins=DIMS.n_mels,
        max_source_positions=DIMS.n_audio_ctx,
        d_model=DIMS.n_audio_state,
        encoder_attention_heads=DIMS.n_audio_head,
        encoder_layers=DIMS.n_audio_layer,
        encoder_ffn_dim=4 * DIMS.n_audio_state,
        vocab_size=DIMS.n_vocab,
        max_target_positions=DIMS.n_text_ctx,
        decoder_attention_heads=DIMS.n_text_head,
        decoder_layers=DIMS.n_text_layer,
        decoder_ffn_dim=4 * DIMS.n_text_state,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), EOT),  # the defaults lie beyond this vocabulary
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.suppress_tokens = SUPPRESSED
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Scaled so that activations stay of order one.
            spread = 0.1 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            middle = 1.0 if name.endswith("layer_norm.weight") else 0.0
            parameter.normal_(middle, spread, generator=random)
    return model


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Whisper's kind of tokenizer with three merges, by the library that writes the published tokenizer.json."""
    library = needed("tokenizers")
    vocab = {token: i for i, token in enumerate([*sorted(library.pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)])}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(TIMESTAMPS)
    return tokenizer


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS.keys())
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    form, directory, model = request.param, tmp_path_factory.mktemp("saved"), random_model()
    model.to(getattr(needed("torch"), form.dtype))
    (model.model if form.inner else model).save_pretrained(directory, max_shard_size=form.max_file_size)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return Saved(form, directory, model.float())  # widening is exact


def test_dims_and_files_are_the_library_s(saved: Saved) -> None:
    """Where small files were asked for there are several, and an index; the reader reads them all."""
    checkpoint, files = open_checkpoint(saved.directory), set(saved.directory.glob("*.safetensors"))
    assert checkpoint.dims == DIMS
    assert (len(files) > 1) == (saved.form.max_file_size == SMALL)
    assert (saved.directory / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert files < set(checkpoint.files)


def test_every_tensor_is_the_library_s(saved: Saved) -> None:
    """To the bit, and none of the library's is left over but the tied projection."""
    checkpoint, state = open_checkpoint(saved.directory), saved.model.state_dict()
    names = {name: their_name(name) for name in expected_shapes(DIMS)}
    assert sorted(names.values()) == sorted(state.keys() - {"proj_out.weight"})
    for ours, theirs in names.items():
        np.testing.assert_array_equal(checkpoint.read(ours).astype(np.float32), state[theirs].numpy(), err_msg=ours)


def test_vocabulary_is_the_library_s(saved: Saved) -> None:
    """Text comes back from the library's ids, the special tokens have its ids, the suppressed ones are generation_config's."""
    theirs, vocabulary = byte_level_tokenizer(), open_checkpoint(saved.directory).vocabulary
    special, text = vocabulary.special, " the naïve – 日本\n"
    assert Tokenizer(vocabulary, lambda: np.zeros(0, np.uint32)).decode(theirs.encode(text).ids) == text
    ids = [special.eot, special.sot, special.languages["en"], special.translate, special.transcribe, special.sot_lm]
    ids += [special.sot_prev, special.no_speech, special.no_timestamps, special.timestamp_begin]
    assert ids == [theirs.token_to_id(token) for token in [*SPECIAL, TIMESTAMPS[0]]]
    assert special.blank == theirs.encode(" ").ids[0]
    assert special.non_speech == (() if saved.form.inner else tuple(SUPPRESSED))


def test_audio_features_and_logits_are_the_library_s(saved: Saved, tmp_path: Path) -> None:
    """The converted model over a full window and a full text context: a prompt at once, then token by token."""
    torch = needed("torch")
    rng = np.random.default_rng(0)
    log_mel = rng.standard_normal((DIMS.n_frames, DIMS.n_mels)).astype(np.float32)
    tokens = rng.integers(DIMS.n_vocab, size=DIMS.n_text_ctx).tolist()
    with torch.no_grad():
        theirs = saved.model(torch.from_numpy(log_mel.T.copy())[None], decoder_input_ids=torch.tensor([tokens]))

    convert(open_checkpoint(saved.directory), tmp_path / "model", weights="f32")
    timings, n_prompt = LayerTimings(), DIMS.n_text_ctx // 2
    with closing(ShardStore(tmp_path / "model")) as store:
        model = Whisper(store, "f32")
        audio_features = model.encoder.encode(log_mel, whole(0, DIMS.n_audio_ctx), timings, lambda: None).copy()
        model.begin_window(log_mel, timings, lambda: None)
        logits = [model.decoder.step(tokens[:n_prompt], range(n_prompt), timings).copy()]
        logits += [model.decoder.step([token], [0], timings).copy() for token in tokens[n_prompt:]]

    np.testing.assert_allclose(audio_features, theirs.encoder_last_hidden_state[0].numpy(), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(logits), theirs.logits[0].numpy(), rtol=0, atol=TOLERANCE)

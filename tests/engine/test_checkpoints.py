"""Both checkpoint readers on a random Whisper: the same tensors, and every kind of damage named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.checkpoints import open_checkpoint
from engine.checkpoints.layout import expected_shapes
from engine.errors import CheckpointInvalid, EngineError
from tests.random_checkpoint import (
    DIMS,
    EOT,
    SPECIAL_IDS,
    SUPPRESSED,
    TIMESTAMP_BEGIN,
    Tensors,
    ctranslate2_tensors,
    huggingface_tensors,
    random_tensors,
    write_ctranslate2,
    write_huggingface,
)


@pytest.mark.parametrize("write", [write_ctranslate2, write_huggingface])
def test_tensors_come_under_openai_names_bit_for_bit(write: object, tmp_path: Path) -> None:
    write(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dims == DIMS
    for name, tensor in random_tensors().items():
        found = checkpoint.read(name)
        assert found.dtype == np.float16
        assert np.array_equal(found, tensor), name


def test_an_index_of_several_files_reads_like_one(tmp_path: Path) -> None:
    write_huggingface(tmp_path, parts=3)
    checkpoint = open_checkpoint(tmp_path)
    assert len([path for path in checkpoint.files if path.suffix == ".safetensors"]) == 3
    assert all(np.array_equal(checkpoint.read(name), tensor) for name, tensor in random_tensors().items())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match="model-00002-of-00003.safetensors is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("write", [write_ctranslate2, write_huggingface])
def test_vocabulary(write: object, tmp_path: Path) -> None:
    write(tmp_path)
    vocabulary = open_checkpoint(tmp_path).vocabulary
    special = vocabulary.special
    assert (special.eot, special.timestamp_begin) == (EOT, TIMESTAMP_BEGIN)
    assert special.languages == {"en": SPECIAL_IDS["<|en|>"], "de": SPECIAL_IDS["<|de|>"]}
    assert special.non_speech == tuple(SUPPRESSED)
    assert not special.multilingual  # by the size of the vocabulary, as in openai/whisper
    begins = vocabulary.token_begins
    tokens = [vocabulary.token_bytes[begins[i] : begins[i + 1]].tobytes() for i in range(EOT)]
    assert tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert tokens[256:] == [b" one", b" two"]


def test_a40_names_of_the_other_scheme_without_its_prefix(tmp_path: Path) -> None:
    def strip(renamed: Tensors) -> None:
        for name in list(renamed):
            renamed[name.removeprefix("model.")] = renamed.pop(name)

    write_huggingface(tmp_path, strip)
    assert open_checkpoint(tmp_path).dims == DIMS


def _drop(name: str) -> object:
    return lambda stored: stored.pop(name)


def _misspell(stored: Tensors) -> None:
    stored["model.encoder.layers.0.self_attn.q_prj.weight"] = stored.pop("model.encoder.layers.0.self_attn.q_proj.weight")


def _extra(stored: Tensors) -> None:
    stored["model.decoder.lora.weight"] = np.zeros((2, 2), np.float16)


def _foreign_prefix(stored: Tensors) -> None:
    for name in list(stored):
        stored[f"module.{name}"] = stored.pop(name)


def _misshape(stored: Tensors) -> None:
    stored["model.encoder.layers.1.fc1.weight"] = np.zeros((7, 64), np.float16)


def _integers(stored: Tensors) -> None:
    stored["model.encoder.layers.1.fc1.weight"] = np.zeros((256, 64), np.int8)


def _untied(stored: Tensors) -> None:
    stored["proj_out.weight"] = stored["model.decoder.embed_tokens.weight"] + np.float16(1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop("model.encoder.layers.2.fc2.bias"), "missing: encoder.blocks.2.mlp.2.bias"),
        (_misspell, "unknown: model.encoder.layers.0.self_attn.q_prj.weight"),
        (_extra, "unknown: model.decoder.lora.weight"),
        (_foreign_prefix, "module.model"),
        (_misshape, r"misshapen: encoder.blocks.1.mlp.0.weight \(7, 64\) for \(256, 64\)"),
        (_integers, "encoder.blocks.1.mlp.0.weight is I8"),
        (_untied, "proj_out.weight is not the token embedding"),
    ],
)
def test_a40_huggingface_names_what_does_not_fit(change: object, named: str, tmp_path: Path) -> None:
    write_huggingface(tmp_path, change)
    with pytest.raises(CheckpointInvalid, match=named):
        open_checkpoint(tmp_path)


def test_a_tied_projection_stored_twice_is_accepted(tmp_path: Path) -> None:
    write_huggingface(tmp_path, lambda s: s.update({"proj_out.weight": s["model.decoder.embed_tokens.weight"].copy()}))
    assert open_checkpoint(tmp_path).dims == DIMS


def test_a41_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    """The four values would differ if they were read as float16."""
    write_huggingface(tmp_path)
    values = np.resize(np.array([1.0, -2.0, 0.5, 3.140625], np.float32), (64,))
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    renamed = huggingface_tensors(random_tensors())
    name = "model.encoder.layer_norm.bias"
    renamed[name] = bits.view(np.float16)  # the library has no bfloat16 for NumPy: write as F16, then relabel
    save_file(renamed, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[name]["dtype"] = "BF16"
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    found = open_checkpoint(tmp_path).read("encoder.ln_post.bias")
    assert found.dtype == np.float32
    assert np.array_equal(found, values)


def _key_bias(stored: Tensors) -> None:
    stored["decoder/layer_1/self_attention/linear_0/bias"][64] = 1


def _int8_weight(stored: Tensors) -> None:
    stored["encoder/layer_0/ffn/linear_0/weight"] = np.zeros((256, 64), np.int8)


def _unknown(stored: Tensors) -> None:
    stored["encoder/layer_0/ffn/linear_9/weight"] = np.zeros((4, 4), np.float16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop("encoder/layer_2/ffn/linear_1/bias"), "missing: encoder.blocks.2.mlp.2.bias"),
        (_key_bias, "key bias"),
        (_int8_weight, "I8; convert float16 or float32"),
        (_unknown, "linear_9"),
        (_drop("decoder/num_heads"), "positive"),
        (_drop("encoder/conv1/weight"), "conv1"),
    ],
)
def test_ctranslate2_names_what_does_not_fit(change: object, named: str, tmp_path: Path) -> None:
    write_ctranslate2(tmp_path, change)
    with pytest.raises(EngineError, match=named):
        open_checkpoint(tmp_path)


def test_ctranslate2_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_ctranslate2(tmp_path)
    path = tmp_path / "model.bin"
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    for length in [0, 3, 4, 20, len(whole) - 1, *rng.integers(21, len(whole), 20)]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointInvalid):
            open_checkpoint(tmp_path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointInvalid, match="follow the end"):
        open_checkpoint(tmp_path)
    path.write_bytes(struct.pack("<I", 7) + whole[4:])
    with pytest.raises(CheckpointInvalid, match="version 7"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[" * 100_000,
        '{"model": {"vocab": [1]}, "added_tokens": []}',
        '{"model": {"vocab": {"a": 9}}, "added_tokens": []}',
    ],
)
def test_a_damaged_tokenizer_is_refused(damage: str, tmp_path: Path) -> None:
    write_ctranslate2(tmp_path)
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json"):
        open_checkpoint(tmp_path)


def test_special_tokens_beyond_the_vocabulary_are_refused_before_a_good_model_is_replaced(tmp_path: Path) -> None:
    write_huggingface(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"][-1]["id"] = DIMS.n_vocab - 1  # the first timestamp would be one too far
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointInvalid, match=f"below n_vocab {DIMS.n_vocab}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_function": "relu"}, "relu"),
        ({"d_model": 96}, "multiple of 64"),
        ({"encoder_attention_heads": 0}, "positive"),
        ({"vocab_size": "many"}, "whole number"),
    ],
)
def test_a_config_that_is_no_whispers_is_refused(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    write_huggingface(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointInvalid, match=named):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index", ["[]", '{"weight_map": {}}', '{"weight_map": {"a": 1, "b": "x"}}', '{"weight_map": {"a": "../x"}}']
)
def test_a_damaged_index_is_refused(index: str, tmp_path: Path) -> None:
    write_huggingface(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors.*model\.bin"):
        open_checkpoint(tmp_path)


def test_the_test_checkpoint_has_the_real_ones_structure() -> None:
    """What the readers are tested on covers every name that the real model has."""
    assert set(random_tensors()) == set(expected_shapes(DIMS))
    assert len(ctranslate2_tensors(random_tensors())) > 100


def test_alignment_heads_are_the_checkpoints_or_the_later_half(tmp_path: Path) -> None:
    write_ctranslate2(tmp_path)
    assert open_checkpoint(tmp_path).alignment_heads == ((1, 0), (1, 1), (2, 0), (2, 1))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"alignment_heads": [[2, 1], [0, 0]]}))
    assert open_checkpoint(tmp_path).alignment_heads == ((0, 0), (2, 1))


@pytest.mark.parametrize("heads", [[], [[0]], [[0, 2]], [[3, 0]], [[-1, 0]], [["0", "0"]], [[0, True]], "all", {"0": 0}])
def test_alignment_heads_that_are_none_are_refused(heads: object, tmp_path: Path) -> None:
    write_huggingface(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": heads}))
    with pytest.raises(CheckpointInvalid, match="alignment_heads"):
        open_checkpoint(tmp_path)

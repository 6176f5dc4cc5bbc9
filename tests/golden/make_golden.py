"""Record openai/whisper's intermediate values on a recording, for tests/engine/test_golden.py.

In an environment of its own (pip install torch==2.13.0 openai-whisper==20250625 soundfile), with this project on the path:

    PYTHONPATH=. python tests/golden/make_golden.py CHECKPOINT_DIR tests/recordings/demo.flac tests/golden/demo.tiny.en.npz

CHECKPOINT_DIR is what `thimble fetch` downloads (CTranslate2's model.bin with config.json and tokenizer.json). Everything is
float32 on one thread. Arrays are thinned, each with its stride, to keep the file below a megabyte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import soundfile
import torch
import whisper
from whisper.audio import N_FRAMES, N_SAMPLES, log_mel_spectrogram, pad_or_trim

from engine.checkpoints import open_checkpoint
from engine.checkpoints.layout import expected_shapes

STRIDES = {"mel": 16, "stem": 50, "block0": 50, "audio_features": 10, "logits": 8}
N_STEPS = 10


def load(directory: Path) -> whisper.Whisper:
    checkpoint = open_checkpoint(directory)
    model = whisper.Whisper(whisper.ModelDimensions(**checkpoint.dims.to_json()))
    names = expected_shapes(checkpoint.dims)
    state = {name: torch.from_numpy(np.array(checkpoint.read(name), np.float32)) for name in names}
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def main() -> None:
    directory, recording, out = map(Path, sys.argv[1:4])
    torch.set_num_threads(1)
    model = load(directory)
    samples, rate = soundfile.read(recording, dtype="float32")
    assert rate == 16_000
    full = log_mel_spectrogram(samples, model.dims.n_mels, padding=N_SAMPLES)
    mel = pad_or_trim(full[:, : full.shape[-1] - N_FRAMES], N_FRAMES)

    seen: dict[str, torch.Tensor] = {}
    logits: list[torch.Tensor] = []
    block = model.encoder.blocks[0]
    block.register_forward_pre_hook(lambda module, inputs: seen.update(stem=inputs[0][0].clone()))
    block.register_forward_hook(lambda module, inputs, output: seen.update(block0=output[0].clone()))
    model.encoder.register_forward_hook(lambda module, inputs, output: seen.update(audio_features=output[0].clone()))
    # Cloned: the logit filters write into what the decoder returned.
    model.decoder.register_forward_hook(lambda module, inputs, output: logits.append(output[0, -1].clone()))
    options = whisper.DecodingOptions(language="en", fp16=False, temperature=0.0)
    result = whisper.decode(model, mel, options)
    features = {name: value.clone() for name, value in seen.items()}
    steps = torch.stack(logits[:N_STEPS])
    text = whisper.transcribe(model, samples, fp16=False, temperature=0.0, language="en")["text"]

    strides = STRIDES
    np.savez_compressed(
        out,
        mel=mel.numpy().T[:: strides["mel"]],
        stem=features["stem"][:: strides["stem"]].numpy(),
        block0=features["block0"][:: strides["block0"]].numpy(),
        audio_features=features["audio_features"][:: strides["audio_features"]].numpy(),
        logits=steps[:, :: strides["logits"]].numpy(),
        logits_argmax=steps.argmax(-1).numpy(),
        tokens=np.array(result.tokens),
        avg_logprob=result.avg_logprob,
        no_speech_prob=result.no_speech_prob,
        text=text,
        version=[f"openai-whisper {whisper.__version__}", f"torch {torch.__version__}"],
        **{f"{name}_stride": stride for name, stride in strides.items()},
    )
    print(f"{out}: {out.stat().st_size} bytes, {text!r}")


if __name__ == "__main__":
    main()

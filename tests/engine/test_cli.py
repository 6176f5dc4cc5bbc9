"""The `thimble` command: results on standard output, exit statuses, one line that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from engine import cli
from engine.kv_cache import KV_POLICIES
from engine.shards.manifest import WEIGHTS
from engine.shards.store import RESIDENCIES
from service.settings import Settings
from tests.conftest import Recording
from tests.words import words


def thimble(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_transcribe_prints_text_and_nothing_else(tiny_en: Path, recordings: dict[str, Recording]) -> None:
    done = thimble("transcribe", "--model", tiny_en, recordings["demo"].path)
    assert done.returncode == 0
    assert words(done.stdout) == words(recordings["demo"].text)
    assert done.stderr == ""


def test_transcribe_json_tells_segments_and_timings(tiny_en: Path, recordings: dict[str, Recording]) -> None:
    done = thimble("transcribe", "--model", tiny_en, "--format", "json", "--residency", "stream", recordings["digits"].path)
    row = json.loads(done.stdout)
    assert row["seconds"] == pytest.approx(recordings["digits"].seconds, abs=0.01)
    assert row["segments"][0]["tokens"]
    assert row["timings"]["shard_loads"] > 20


def test_one_bad_file_does_not_keep_the_others(tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("no sound")
    done = thimble("transcribe", "--model", tiny_en, tmp_path / "bad", tmp_path / "absent", recordings["digits"].path)
    assert done.returncode == 1
    assert done.stdout.strip()
    lines = done.stderr.splitlines()
    assert "[unsupported_audio]" in lines[0]
    assert "No such file" in lines[1]
    assert lines[2] == "thimble: 2 of 3 files failed"


@pytest.mark.parametrize("name", ["WEIGHTS", "KV", "RESIDENCY"])
def test_a_wrong_choice_from_the_environment_is_a_wrong_call(name: str, tmp_path: Path) -> None:
    done = thimble("transcribe", "x", env={"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), f"THIMBLE_{name}": "zz"})
    assert done.returncode == 2
    assert f"THIMBLE_{name} is one of" in done.stderr


def test_choices_are_the_engines_and_the_services() -> None:
    """The command line and the settings name them without importing NumPy; what they name must be what is there."""
    assert set(cli.WEIGHTS) == set(WEIGHTS) == set(get_args(Settings.model_fields["weights"].annotation))
    assert set(cli.KV) == set(KV_POLICIES) == set(get_args(Settings.model_fields["kv"].annotation))
    assert set(cli.RESIDENCY) == set(RESIDENCIES) == set(get_args(Settings.model_fields["residency"].annotation))


def test_convert_and_inspect(random_checkpoint: Path, tmp_path: Path) -> None:
    assert thimble("convert", random_checkpoint, tmp_path / "m", "--weights", "f16").returncode == 0
    shown = thimble("inspect", tmp_path / "m")
    assert shown.returncode == 0
    assert "decoder-02-03.safetensors" in shown.stdout
    assert json.loads(thimble("inspect", "--json", tmp_path / "m").stdout)["weights"] == "f16"
    (tmp_path / "m" / "encoder-stem.safetensors").unlink()
    broken = thimble("inspect", tmp_path / "m")
    assert (broken.returncode, broken.stdout) == (1, "")
    assert "encoder-stem.safetensors is missing" in broken.stderr
    assert len(broken.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "COMMAND"),
        (["transcribe"], 2, "FILE"),
        (["transcribe", "--kv", "int4", "x"], 2, "int4"),
        (["transcribe", "--model", "huge", "x"], 1, "no model directory"),
        (["convert", "/nonexistent", "x"], 1, "holds no"),
        (["inspect", "/nonexistent"], 1, "thimble fetch"),
        (["fetch", "huge"], 1, "known: tiny.en, base"),
    ],
)
def test_wrong_calls(arguments: list[str], status: int, said: str, tmp_path: Path) -> None:
    done = thimble(*arguments, cwd=tmp_path, env={"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""

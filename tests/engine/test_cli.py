"""The `thimble` command: results on standard output, exit statuses, one line that says what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from engine import cli
from engine.kv_cache import KV_POLICIES
from engine.shards.manifest import WEIGHTS
from engine.shards.residency import RESIDENCIES
from engine.tail import TAILS
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


def test_formats_of_several_files_with_one_load(tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    """To standard output one after another; beside the files under their names."""
    paths = [tmp_path / "digits.flac", tmp_path / "demo.wav"]
    paths[0].write_bytes(recordings["digits"].path.read_bytes())
    paths[1].write_bytes(recordings["demo"].path.read_bytes())  # its bytes decide what it is
    done = thimble("transcribe", "--model", tiny_en, "--format", "srt", *paths)
    assert done.stdout.count("00:00:00,000 --> ") == 2
    beside = thimble("transcribe", "--model", tiny_en, "--format", "srt", "--beside", *paths)
    assert (beside.returncode, beside.stdout) == (0, "")
    assert "".join(path.with_suffix(".srt").read_text() for path in paths) == done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"digits.flac", "demo.wav", "digits.srt", "demo.srt"}


def test_a_transcript_never_replaces_its_recording(tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    path = tmp_path / "digits.txt"
    path.write_bytes(recordings["digits"].path.read_bytes())
    done = thimble("transcribe", "--model", tiny_en, "--beside", path)
    assert done.returncode == 1
    assert "replace the recording itself [name_taken]" in done.stderr
    assert path.read_bytes() == recordings["digits"].path.read_bytes()


def test_two_recordings_of_one_name_do_not_replace_each_others_transcripts(
    tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path
) -> None:
    for name in ("digits.wav", "digits.flac"):
        (tmp_path / name).write_bytes(recordings["digits"].path.read_bytes())
    done = thimble("transcribe", "--model", tiny_en, "--beside", tmp_path / "digits.wav", tmp_path / "digits.flac")
    assert done.returncode == 1
    assert "that of another recording [name_taken]" in done.stderr
    assert (tmp_path / "digits.txt").read_text()


@pytest.mark.parametrize("beside", [["--beside"], []])
def test_a_name_that_is_no_utf_8_is_a_files_all_the_same(
    beside: list[str], tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff.flac"))
    path.write_bytes(recordings["digits"].path.read_bytes())
    other = tmp_path / "digits.flac"
    other.write_bytes(path.read_bytes())
    done = thimble("transcribe", "--model", tiny_en, "--format", "json", *beside, path, other)
    assert "Traceback" not in done.stderr
    if not beside:
        first, second = map(json.loads, done.stdout.splitlines())
        assert first["text"] == second["text"]
        assert first["file"].endswith("x\ufffd.flac")


def test_decoding_options_reach_the_engine(tiny_en: Path, recordings: dict[str, Recording]) -> None:
    options = ["--word-timestamps", "--beam-size", "2", "--prompt", "Numbers", "--temperature", "0,0.5", "--seed", "3"]
    done = thimble("transcribe", "--model", tiny_en, "--format", "json", *options, recordings["digits"].path)
    segments = json.loads(done.stdout)["segments"]
    assert sum(len(segment["words"]) for segment in segments) == 10
    assert json.loads(done.stdout)["language"] == "en"


def test_a_reader_that_leaves_is_no_traceback(tiny_en: Path, recordings: dict[str, Recording]) -> None:
    command = f"{sys.executable} -m engine transcribe --model {tiny_en} {recordings['digits'].path} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)  # noqa: S602 - the shell's pipe is what is tested
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_wer_tells_sets_totals_and_what_it_took(tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    pytest.importorskip("jiwer", reason="the measure extra is not installed")
    rows = [{"path": str(recordings["demo"].path), "set": "own", "text": recordings["demo"].text}]
    rows += [{"path": "bad", "set": "other", "text": "x"}, {"path": "unknown", "set": "own", "text": None}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bad").write_text("no sound")
    done = thimble("wer", tmp_path / "m.jsonl", "--model", tiny_en, "--sets", "own", "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["scores"]["own"]["n_files"] == 1
    assert told["scores"]["total"]["percent"] <= 5
    assert told["real_time_factor"] > 0
    assert told["peak_resident_bytes"] > 20e6
    table = thimble("wer", tmp_path / "m.jsonl", "--model", tiny_en)
    assert table.returncode == 1
    assert "total" in table.stdout
    assert "1 of 2 recordings could not be scored" in table.stderr


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

    def choices(name: str) -> set[str]:
        named = get_args(Settings.model_fields[name].annotation)
        return set(named) if isinstance(named[0], str) else set(get_args(named[0]))  # or None

    assert set(cli.WEIGHTS) == set(WEIGHTS) == choices("weights")
    assert set(cli.KV) == set(KV_POLICIES) == choices("kv")
    assert set(cli.TAIL) == set(TAILS) == choices("tail")
    assert set(cli.RESIDENCY) == set(RESIDENCIES) == choices("residency")


def test_a_plan_is_printed_and_a_budget_that_does_not_do_refused(tiny_en: Path) -> None:
    foreseen = json.loads(thimble("plan", tiny_en, "--budget", "80M", "--read-bps", "50M", "--json").stdout)
    assert foreseen["peak_bytes"] <= foreseen["budget_bytes"] == 80 << 20
    assert foreseen["token_read_seconds"] == foreseen["token_read_bytes"] / (50 << 20)
    table = thimble("plan", tiny_en).stdout
    mib = {name.strip(): float(n) for name, n in re.findall(r"^( *\w.*?) +([\d.]+) MiB$", table, re.MULTILINE)}
    assert mib["peak"] == pytest.approx(sum(mib[part] for part in ("process", "work", "arena", "weights")), abs=0.3)
    assert mib["peak"] <= mib["budget"]  # what this machine has left
    assert re.search(r"^stays mapped +\S.*decoder-embedding", table, re.MULTILINE)
    refused = thimble("plan", tiny_en, "--budget", "20M")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "[memory_budget_exceeded]" in refused.stderr


def test_bench_tells_every_layer_and_the_peaks(tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    """And what it printed is what a plan foresees seconds from."""
    arguments = ["bench", "--model", tiny_en, "--budget", "70M", recordings["digits"].path]
    times = tmp_path / "times.json"
    times.write_text(thimble(*arguments, "--json").stdout)
    figures = json.loads(times.read_text())
    foreseen = json.loads(thimble("plan", tiny_en, "--times", times, "--json").stdout)
    waited = sum(seconds for _, _, kind, seconds, _ in figures["timings"]["layers"] if kind == "wait")
    assert foreseen["recording_seconds"] == pytest.approx(figures["seconds"] - waited)  # nothing is read with all in memory
    assert {(stack, layer) for stack, layer, *_ in figures["timings"]["layers"]} >= {("encoder", "0"), ("decoder", "3")}
    assert figures["tokens"] > 5
    assert figures["tokens_per_second"] > 0
    assert figures["shard_bytes"] > 30 << 20  # nothing stays under this budget: read again at every token
    assert 30 << 20 < figures["anonymous_bytes"] + figures["file_bytes"] <= figures["peak_resident_bytes"] + (1 << 20)
    assert figures["peak_resident_bytes"] <= figures["planned_peak_bytes"] + (2 << 20)
    table = thimble(*arguments).stdout
    assert "decoder embedding" in table
    assert "tokens per second" in table


def test_bench_compares_other_shards(random_checkpoint: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    """Fewer layers in a shard are more loads; what is heard stays, and nothing else."""
    model = tmp_path / "models" / "random"
    assert thimble("convert", random_checkpoint, model).returncode == 0
    arguments = ["bench", "--model", model, "--temperature", "0", "--max-tokens", "4", recordings["digits"].path]
    shards = json.loads(thimble(*arguments, "--compare", "shards", "--json").stdout)["shards"]
    assert list(shards) == ["1", "2", "3", "all"]
    loads = [row["shard_loads"] for row in shards.values()]
    assert loads[0] > loads[1] > loads[2] == loads[3]  # of three layers
    assert len({row["texts"][0] for row in shards.values()}) == 1
    assert [path.name for path in model.parent.iterdir()] == ["random"]


def test_bench_compares_smaller_budgets(tiny_en: Path, recordings: dict[str, Recording]) -> None:
    """Less memory is read more often, and what is foreseen falls with it."""
    arguments = ["bench", "--model", tiny_en, "--temperature", "0", "--max-tokens", "4", recordings["digits"].path]
    rows = list(json.loads(thimble(*arguments, "--compare", "budget", "--json").stdout)["budget"].values())
    foreseen, mapped = ([row[name] for row in rows] for name in ("planned_peak_bytes", "shard_bytes"))
    assert len(rows) == 5
    assert foreseen == sorted(set(foreseen), reverse=True)
    assert mapped == sorted(mapped)
    assert mapped[0] < mapped[-1]
    assert len({row["texts"][0] for row in rows}) == 1


@pytest.mark.slow
def test_bench_over_a_manifest_tells_what_is_wrong_under_each_policy(
    tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path
) -> None:
    pytest.importorskip("jiwer", reason="the measure extra is not installed")
    row = {"path": str(recordings["digits"].path), "text": recordings["digits"].text}
    (tmp_path / "m.jsonl").write_text(json.dumps(row) + "\n")
    lines = thimble("bench", "--model", tiny_en, tmp_path / "m.jsonl", "--compare", "kv").stdout.splitlines()
    head, f32, *others = (line.split() for line in lines)
    assert (head[0], head[-4:], f32[0], f32[-3]) == ("kv", ["changed", "foreseen", "%", "wrong"], "f32", "0")
    assert {other[0] for other in others} == {"int8", "shared-f32", "shared-int8", "int8-half"}
    assert thimble("bench", tmp_path / "m.jsonl", "--compare", "speed").returncode == 2


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


def test_convert_reshard_and_inspect_tell_layers_that_are_kept(random_checkpoint: Path, tmp_path: Path) -> None:
    keep = ["--keep", "f16:decoder.0,encoder.2", "--keep", "f32:decoder.embedding"]
    done = thimble("convert", random_checkpoint, tmp_path / "m", "--layers-per-shard", "all", *keep)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith("MB in 5 files\n")
    assert thimble("reshard", tmp_path / "m", tmp_path / "n", "--layers-per-shard", "1").returncode == 0
    for directory, shard in (("m", "encoder-00-03.safetensors"), ("n", "encoder-01-02.safetensors")):
        shown = thimble("inspect", tmp_path / directory).stdout
        assert "kept       encoder.2 f16, decoder.embedding f32, decoder.0 f16\n" in shown
        assert shard in shown
        told = json.loads(thimble("inspect", "--json", tmp_path / directory).stdout)
        assert told["kept"] == {"encoder.2": "f16", "decoder.embedding": "f32", "decoder.0": "f16"}
    over_itself = thimble("reshard", tmp_path / "n", tmp_path / "n", "--layers-per-shard", "2")
    assert (over_itself.returncode, over_itself.stderr.count("\n")) == (1, 1)
    assert "[name_taken]" in over_itself.stderr


@pytest.mark.weights
def test_convert_random_writes_a_model_of_the_size_that_is_named(tmp_path: Path) -> None:
    done = thimble("convert", "--random", "tiny.en", tmp_path / "m", "--layers-per-shard", "3")
    assert done.returncode == 0
    told = json.loads(thimble("inspect", "--json", tmp_path / "m").stdout)
    assert told["source"] == {"format": "random tiny.en", "sha256": {}}
    assert (told["weights"], told["dims"]["n_text_state"], told["kept"]) == ("int8", 384, {})
    assert "decoder-00-03.safetensors" in [file["file"] for file in told["files"]]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "COMMAND"),
        (["transcribe"], 2, "FILE"),
        (["transcribe", "--kv", "int4", "x"], 2, "int4"),
        (["transcribe", "--task", "summarise", "x"], 2, "transcribe, translate"),
        (["transcribe", "--patience", "2", "x"], 2, "give beam_size too"),
        (["transcribe", "--temperature", "warm", "x"], 2, "warm"),
        (["wer", "absent.jsonl"], 1, "absent.jsonl"),
        (["transcribe", "--model", "huge", "x"], 1, "no model directory"),
        (["convert", "/nonexistent", "x"], 1, "holds no"),
        (["convert", "--random", "huge", "x"], 2, "known: tiny.en"),
        (["convert", "--random", "x"], 2, "directory"),
        (["convert", "--random", "tiny", "x", "--keep", "f16:decoder.7"], 2, "decoder.0 to 3"),
        (["convert", "--random", "tiny", "x", "--keep", "f16:decoder.1", "--weights", "f32"], 2, "f32 already"),
        (["convert", "--random", "tiny", "x", "--layers-per-shard", "0"], 2, "1 or more, nor all"),
        (["convert", "--random", "tiny", "x", "--layers-per-shard", "two"], 2, "'two' is neither"),
        (["reshard", "/nonexistent", "x"], 2, "--layers-per-shard"),
        (["reshard", "/nonexistent", "x", "--layers-per-shard", "all"], 1, "thimble fetch"),
        (["inspect", "/nonexistent"], 1, "thimble fetch"),
        (["fetch", "huge"], 1, "known: tiny.en, base"),
        (["plan", "huge", "--budget", "90M"], 1, "no model directory"),
        (["plan", "huge", "--budget", "90 bananas"], 2, "no size"),
        (["transcribe", "--budget", "90M", "--residency", "stream", "x"], 2, "not allowed with"),
    ],
)
def test_wrong_calls(arguments: list[str], status: int, said: str, tmp_path: Path) -> None:
    done = thimble(*arguments, cwd=tmp_path, env={"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""

"""A budget and what follows from it; what is foreseen, and what a process then takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from engine.decoding import DecodingOptions
from engine.dims import SAMPLE_RATE
from engine.errors import MemoryBudgetExceeded
from engine.plan import KV_CHOICES, Plan, all_plans, make_plan
from engine.shards.manifest import Manifest, read_manifest
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording
from tests.limits import limited_group
from tests.words import words

MIB = 1 << 20
PROCESS = 36 * MIB


@pytest.fixture(scope="module")
def manifest(tiny_en: Path) -> Manifest:
    return read_manifest(tiny_en)


def ways(manifest: Manifest, kv: tuple[str, ...] = ("int8",)) -> list[Plan]:
    return all_plans(manifest, PROCESS, kv)


def test_each_way_to_run_is_what_a_byte_less_than_the_one_before_makes(manifest: Manifest) -> None:
    budget = 1 << 40
    for plan in ways(manifest):
        assert make_plan(manifest, budget, PROCESS, ("int8",)) == plan
        budget = plan.peak_bytes - 1


def test_the_more_memory_the_less_is_read(manifest: Manifest) -> None:
    """From everything mapped, by the encoder streamed, then the decoder, to nothing that stays."""
    plans = ways(manifest)
    assert len(plans) >= 5
    assert (plans[0].token_read_bytes, plans[0].window_read_bytes) == (0, 0)
    assert plans[1].token_read_bytes == 0 < plans[1].window_read_bytes
    reads = [plan.token_read_bytes for plan in plans]
    assert reads == sorted(reads)
    assert plans[-1].residency.pinned == frozenset()
    assert plans[-1].token_read_bytes == pytest.approx(30.2 * MIB, rel=0.05)  # the decoder and the embedding, whole


def test_a_plan_keeps_within_its_budget_and_one_byte_less_than_the_least_is_refused(manifest: Manifest) -> None:
    least = ways(manifest)[-1].peak_bytes
    assert make_plan(manifest, least, PROCESS, ("int8",)).peak_bytes == least
    with pytest.raises(MemoryBudgetExceeded, match=rf"{least - 1} bytes do not do: {least} are needed at least") as refused:
        make_plan(manifest, least - 1, PROCESS, ("int8",))
    assert refused.value.code == "memory_budget_exceeded"


def test_a_smaller_cache_is_chosen_where_nothing_else_does_and_nobody_asked_for_another(manifest: Manifest) -> None:
    large = manifest.dims.__class__(**{**manifest.dims.to_json(), "n_text_layer": 40})
    many = Manifest(**{**{name: getattr(manifest, name) for name in manifest.__dataclass_fields__}, "dims": large})
    least = ways(many)[-1].peak_bytes
    assert make_plan(many, least, PROCESS, KV_CHOICES).kv == "int8"
    assert make_plan(many, least - 1, PROCESS, KV_CHOICES).kv == "shared-int8"


def measure(model: Path, budget: int, recording: Path) -> tuple[Plan, int, str]:
    """The plan, the most that the process had resident (proc(5), VmHWM), and the text."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from engine.transcribe import Engine; from engine.timings import LayerTimings\n"
        "engine = Engine(Path(sys.argv[1]), budget_bytes=int(sys.argv[2]))\n"
        "text = engine.transcribe(Path(sys.argv[3]), LayerTimings()).text\n"
        "status = dict(line.split(':') for line in open('/proc/self/status'))\n"
        "print(json.dumps([engine.plan.peak_bytes, int(status['VmHWM'].split()[0]) * 1024, text]))\n"
    )
    command = [sys.executable, "-c", code, str(model), str(budget), str(recording)]
    return tuple(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))  # type: ignore[return-value]


@pytest.mark.parametrize("mib", [120, *(pytest.param(mib, marks=pytest.mark.slow) for mib in (93, 83, 73)), 66])
def test_the_peak_is_the_one_foreseen(mib: int, tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    """Within a tenth, and not more than 2 MiB above; half a minute, so that a window's buffers are used whole."""
    samples, rate = soundfile.read(recordings["long"].path, frames=31 * SAMPLE_RATE)
    soundfile.write(tmp_path / "window.flac", samples, rate)
    foreseen, measured, text = measure(tiny_en, mib * MIB, tmp_path / "window.flac")
    assert foreseen <= mib * MIB
    assert measured <= foreseen + 2 * MIB
    assert foreseen == pytest.approx(measured, rel=0.1)
    assert text.split()[:5] == ["A", "small", "computer", "sits", "on"]


def test_every_plan_hears_the_same(tiny_en: Path, manifest: Manifest, recordings: dict[str, Recording]) -> None:
    options = DecodingOptions(temperatures=(0.0,))

    def hear(engine: Engine) -> tuple[int, ...]:
        segments = engine.transcribe(recordings["digits"].path, LayerTimings(), options).segments
        return tuple(token for segment in segments for token in segment.tokens)

    expected = hear(Engine(tiny_en))
    for plan in ways(manifest)[1::2]:
        assert hear(Engine(tiny_en, residency=plan.residency)) == expected


PAUSED = """
import json, sys; from pathlib import Path
from engine.decoding import DecodingOptions; from engine.transcribe import Engine; from engine.timings import LayerTimings
engine = Engine(Path(sys.argv[1]), budget_bytes=int(sys.argv[2]))
asked = 0
def should_stop():
    global asked
    asked += 1
    if asked == 20:  # the encoder is through, some tokens are decoded
        print(engine.plan.peak_bytes, flush=True)
        sys.stdin.readline()
    return False
options = DecodingOptions(temperatures=(0.0,))
print(engine.transcribe(Path(sys.argv[3]), LayerTimings(), options, should_stop=should_stop).text)
"""


@pytest.mark.parametrize(
    ("mib", "name"), [(66, "demo"), *(pytest.param(mib, "long", marks=pytest.mark.slow) for mib in (66, 83))]
)
def test_a_limit_lowered_to_what_was_foreseen_in_the_middle_of_a_job_is_lived_under(
    mib: int, name: str, tiny_en: Path, recordings: dict[str, Recording]
) -> None:
    """Page cache and kernel memory count too: the kernel drops what it can, and takes nothing that the job needs."""
    with limited_group() as group:
        command = [sys.executable, "-c", PAUSED, str(tiny_en), str(mib * MIB), str(recordings[name].path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, preexec_fn=group.enter, **pipes) as process:  # type: ignore[call-overload]
            group.limit(int(process.stdout.readline()))
            text, _ = process.communicate("\n", timeout=300)
            assert process.returncode == 0
            assert group.oom_kills() == 0
    assert words(text)[:4] == words(recordings[name].text)[:4]

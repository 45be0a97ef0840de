"""A headless Chromium that is spoken to through two pipes (Chrome DevTools Protocol), without the network."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OURS = ("file:", "data:", "blob:", "http://127.0.0.1:")  # addresses of this machine
FLAGS = (
    "--headless --no-sandbox --disable-gpu --remote-debugging-pipe "
    "--host-resolver-rules='MAP * ~NOTFOUND, EXCLUDE 127.0.0.1' "
    "--allow-file-access-from-files=false --hide-scrollbars --no-first-run"
)


def find():
    """The program, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page, which is sent from address to address; what its scripts complained about is in `problems`."""

    def __init__(self, folder):
        ours, theirs = os.pipe(), os.pipe()  # requests, answers
        command = f"exec {find()} {FLAGS} --user-data-dir={folder} 3<&{ours[0]} 4>&{theirs[1]}"
        self.process = subprocess.Popen(
            command, shell=True, executable="/bin/bash", pass_fds=(ours[0], theirs[1]), stderr=subprocess.DEVNULL
        )
        os.close(ours[0]), os.close(theirs[1])
        self.write, self.read = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self.number, self.session, self.problems, self.waiting = 0, None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def message(self):
        """The next message of the browser."""
        data = bytearray()
        while (byte := self.read.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        found = json.loads(data)
        method, params = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str(params["args"]))
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"] + params["entry"].get("url", ""))
        if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(OURS):
            self.problems.append(f"asks for {params['request']['url']}")
        return found

    def call(self, method, **params):
        """The answer to a request."""
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        self.write.write(json.dumps(request | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while (found := self.message()).get("id") != self.number:
            self.waiting.append(found.get("method"))
        assert "error" not in found, found
        return found["result"]

    def open(self, path, width=1280, height=900, dark=False):
        """Show a page at a size, in light or dark, and wait until it is loaded; returns what was complained about."""
        self.problems, self.waiting = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        url = path if str(path).startswith(OURS) else Path(path).resolve().as_uri()
        loads = "loaderId" in self.call("Page.navigate", url=url)  # another place on the same page loads nothing
        while loads and "Page.loadEventFired" not in self.waiting:
            self.waiting.append(self.message().get("method"))
        return self.problems

    def run(self, expression):
        """The value of an expression on the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path):
        """Write what is seen as a PNG."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self):
        """End the browser."""
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        self.process.wait(timeout=30)

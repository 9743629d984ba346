"""A headless Chromium, driven by the DevTools protocol over a pair of pipes.

python -m tests.support.browser http://127.0.0.1:8001/ FOLDER   # screenshots for docs/images
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_CALL_S = 60.0


class Browser:
    """One page. Use as a context manager; every call raises TimeoutError after a minute."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = TemporaryDirectory(ignore_cleanup_errors=True)
        (reads, self._out), (self._in, writes) = os.pipe(), os.pipe()
        # Above those that the shell gives other meanings to.
        theirs_in, theirs_out = (fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (reads, writes))
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"]
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        for one in (reads, writes, theirs_in, theirs_out):
            os.close(one)
        self._buffer = b""
        self._number = 0
        self._session = ""
        # Texts of what the page logged as errors: blocked resources, exceptions.
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol. RuntimeError where it fails."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _CALL_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(answer["error"]["message"])
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Opens a page in a window of this size."""
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = 30.0) -> None:
        """Returns once the expression is true; TimeoutError where it does not become so."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(script):
            if time.monotonic() > deadline:
                raise TimeoutError(script)
            time.sleep(0.05)

    def ask(self, prompt: str, tokens: int = 12) -> None:
        """Types a prompt into the page's box, sends it by keyboard alone, and waits for its trace."""
        self.evaluate(f"document.getElementById('max-tokens').value = {tokens}")
        self.evaluate("document.getElementById('prompt').focus()")
        self.call("Input.insertText", text=prompt)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 2}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)
        self.until("!document.getElementById('trace').hidden", 120.0)

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer


def main(url: str, folder: Path, prompt: str) -> None:
    """Two widths, the wide one light and the narrow one dark."""
    for name, width, dark in (("wide", 1280, False), ("narrow", 400, True)):
        with Browser() as browser:
            browser.open(url, width, dark=dark)
            browser.until("document.querySelectorAll('#workers tbody tr').length > 1")
            time.sleep(12)  # a history for the small charts
            browser.ask(prompt)
            time.sleep(2)
            browser.screenshot(folder / f"page-{name}.png")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

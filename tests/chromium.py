"""A headless Chromium, driven over the DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[1] / ".tools" / "chromium"
_PATIENCE = 60.0  # seconds
_FLAGS = (
    *("--headless", "--no-sandbox", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


class Page:
    """One tab. What its console says, CSP violations among it, is in `said`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.said: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + _PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"), self.said)
            time.sleep(0.02)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Types one key that is no letter."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            sent = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **sent)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.call("Page.close")

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """Takes an event of the tab."""
        if method == "Log.entryAdded":
            self.said.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(one.get("value", one)) for one in params["args"]))


class Browser:
    """One process."""

    def __init__(self, folder: Path) -> None:
        assert (TOOLS / "chromium").exists(), "`make proofs` fetches Chromium"
        read, write = os.pipe()
        their_read, self._write = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4, which ours must not be.
        theirs = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (their_read, write)]
        os.close(their_read)
        os.close(write)
        begin = f"import os, sys; os.dup2({theirs[0]}, 3); os.dup2({theirs[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        fonts = folder / "fonts.conf"
        fonts.write_text(f"<fontconfig><dir>{TOOLS / 'fonts'}</dir><cachedir>{folder}</cachedir></fontconfig>\n")
        paths = {"LD_LIBRARY_PATH": f"{TOOLS}:{TOOLS / 'lib'}", "FONTCONFIG_FILE": str(fonts), "HOME": str(folder)}
        command = [
            sys.executable,
            "-c",
            begin,
            str(TOOLS / "chromium"),
            *_FLAGS,
            f"--user-data-dir={folder / 'profile'}",
        ]
        with (folder / "chromium.log").open("w") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **paths}, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=log
            )
        for one in theirs:
            os.close(one)
        self._read, self._buffer, self._number = read, b"", 0
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page.heard(answer["method"], answer["params"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        os.close(self._read)
        os.close(self._write)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE)
            assert ready, "Chromium says nothing"
            came = os.read(self._read, 1 << 20)
            assert came, "Chromium has ended"
            self._buffer += came
        line, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Ends with the block."""
    one = Browser(folder)
    try:
        yield one
    finally:
        one.close()

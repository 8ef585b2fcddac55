"""A browser at work: just enough of the WebDriver protocol for chromedriver, standard library."""

import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_TIMEOUT_S = 60


class Browser:
    """One window of a headless Chromium."""

    def __init__(self, address: str, profile: str) -> None:
        self._address = address
        options = {"binary": BROWSER, "args": [*_OPTIONS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._session = f"/session/{self._ask('/session', wanted)['sessionId']}"

    def open(self, file: Path) -> None:
        """Load a file, and wait until it is laid out: on a busy machine that may be later."""
        self._ask(f"{self._session}/url", {"url": file.as_uri()})
        frames = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        self._ask(f"{self._session}/execute/async", {"script": frames, "args": []})

    def run(self, script: str) -> Any:
        """What a script returns in the page."""
        return self._ask(f"{self._session}/execute/sync", {"script": script, "args": []})

    def look(self, width: int, height: int, scheme: str) -> None:
        """Set the window's size in CSS pixels, and whether it is dark or light."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._tell("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._tell("Emulation.setEmulatedMedia", {"features": features})

    def close(self) -> None:
        """End the browser."""
        self._ask(self._session, method="DELETE")

    def _tell(self, command: str, parameters: dict[str, Any]) -> None:
        body = {"cmd": command, "params": parameters}
        self._ask(f"{self._session}/goog/cdp/execute", body)

    def _ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if method == "DELETE" else json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            self._address + path, data=data, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, gone afterwards."""
    assert DRIVER and BROWSER, "look at them before"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert driver.stdout is not None
            port = next(
                found[1]
                for line in driver.stdout
                if (found := re.search(r"started successfully on port (\d+)", line))
            )
            window = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
            driver.wait(timeout=_TIMEOUT_S)

"""Headless Chromium by its remote-debugging pipe (JSON messages that end in a zero byte), for tests of the report."""

import json
import os
import shutil
import subprocess
import tempfile
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """`with Browser() as browser: browser.open(path)`

    problems: what the console, the policy or a script complained of. requests: every address that the page asked for.
    """

    def __enter__(self):
        self.profile = tempfile.mkdtemp()
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]

        def place():
            """Chromium reads from descriptor 3 and writes to 4."""
            first, second = os.dup(read_end), os.dup(write_end)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *words, f"--user-data-dir={self.profile}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end), os.close(write_end)
        self._count, self._buffer, self.session = 0, b"", None
        self.problems, self.requests, self._loaded = [], [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self._in), os.close(self._out)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event):
        method, about = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(about)[:500])

    def open(self, path, width=1280, height=900, dark=False, javascript=True):
        """Load a file at a size of the window and wait until it has drawn itself."""
        self.call("Emulation.setScriptExecutionDisabled", value=not javascript)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._loaded, self.problems, self.requests = False, [], []
        self.call("Page.navigate", url=f"file://{path}")
        while not self._loaded:
            self._note(self._next())

    def value(self, expression):
        """What a JavaScript expression gives (a promise is awaited)."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression, seconds=5):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(f"!!({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def set(self, id, value):
        """Type or choose a value in a field."""
        self.value(
            f"(() => {{ const field = document.getElementById({json.dumps(id)}); field.value = {json.dumps(value)};"
            "for (const name of ['input', 'change']) field.dispatchEvent(new Event(name, { bubbles: true })); })()"
        )

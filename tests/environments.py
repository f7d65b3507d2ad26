"""Virtual environments in which slothplug is installed from a wheel, beside what the tests' own environment has."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


class Environment:
    """A virtual environment in ``folder``; the packages of this interpreter's are visible in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.scripts = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        (self.packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self) -> None:
        """Builds this repository's wheel and installs it, without the network."""
        wheels = self.scripts.parent / "wheels"
        wheels.mkdir()
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True, timeout=300)
        (self.wheel,) = wheels.iterdir()
        self.pip("install", "--no-deps", "--no-index", str(self.wheel))

    def pip(self, *words: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.scripts / "python"), "--quiet", *words]
        subprocess.run(command, check=True, capture_output=True, timeout=300)

    def run(
        self, *words: str, cwd: Path | None = None, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script of this environment, such as ``python``, without a trace of the repository on its path."""
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")
        }
        return subprocess.run(
            [str(self.scripts / words[0]), *words[1:]],
            capture_output=True, text=True, timeout=280, check=check,
            cwd=cwd or self.scripts, env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        )  # fmt: skip

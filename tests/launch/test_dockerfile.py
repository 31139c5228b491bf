"""The Dockerfile's layers, as far as they go without Docker: files come through .dockerignore, and what they install
runs in an environment that has nothing else."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fitune
from fitune.launch.manifests import _before_it_stops
from fitune.recipe.job import JobSettings

ROOT = Path(fitune.__file__).parents[2]
NOT_HERE = ("apt-get", "useradd")
"""They change the machine that runs the tests."""


def instructions():
    """Name and words of each instruction, in one line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, words.strip()) for name, words in found]


def test_every_file_that_is_copied_passes_the_ignore_file():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    admitted = {line[1:] for line in ignored if line.startswith("!")}
    copied = {name for kind, words in instructions() if kind == "COPY" for name in shlex.split(words)[:-1]}
    assert copied == admitted
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_fits_what_the_manifests_say_of_it():
    """The Ray of a manifest is the one that is installed, and pods find programs and files where they look."""
    assert f"\nray=={JobSettings().ray_version}\n" in (ROOT / "constraints.txt").read_text()
    said = dict(instructions())
    assert said["USER"] == "fitune"
    assert "useradd --uid 1000" in (ROOT / "Dockerfile").read_text()
    assert _before_it_stops(100)[0] == "python"


@pytest.mark.weekly
def test_the_layers_install_a_fitune_that_runs(tmp_path):
    """Minutes: torch and all libraries go into an empty environment, which takes the place of the image."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    environment = {
        "PATH": f"{tmp_path}/image/bin:/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_COMPILE": "1",
        "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip"),
        **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))},
    }  # fmt: skip
    folder, skipped = tmp_path / "opt", []
    folder.mkdir()

    def run(*command, cwd=tmp_path):
        ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        return ended.stdout

    for kind, words in instructions():
        if kind == "COPY":
            *names, to = shlex.split(words)
            for name in names:
                target = folder / to / (name if to == "./" else "")
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, target, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / name, target)
        elif kind == "RUN" and any(word in words for word in NOT_HERE):
            skipped.append(words)
        elif kind == "RUN":
            run("bash", "-ec", words.replace("--no-cache-dir", ""), cwd=folder)
    assert len(skipped) == len(NOT_HERE)
    shutil.rmtree(folder)  # what is installed does without the sources
    for command in ("fitune --version", "ray --version", "python -m fitune.launch.draining 1"):
        run(*command.split())
    assert "tokens/s" in run(
        *["fitune", "plan", "--model", "llama-3.2-1b", "--gpu", "h100", "--tuning", "qlora"]
    )
    run("python", "-c", "import ray.dashboard.modules.job.sdk, aiohttp, torch, deepspeed, bitsandbytes, s3fs")

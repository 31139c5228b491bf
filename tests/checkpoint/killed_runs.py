"""Kill -9 a training run again and again, damage what it left, and let it go on.

Run as a program: ``killed_runs.py FOLDER MODEL DATA --kills N --seed S``. Each attempt is a forked child that
runs ``fitune train --resume`` and dies before a random call of the operating system, or after a random time. Between
two attempts a file of the checkpoints or the log may be flipped, truncated, deleted or exchanged with another. Prints
one JSON object of what was seen, which FOLDER/seen.json has after every attempt, too, and a line an attempt on standard
error; anything that contradicts the two promises ends it with an AssertionError:

- a run that ends has the weights, losses and steps of the undisturbed one, bit for bit;
- an attempt goes on from the newest checkpoint without damage, and names each newer one that it passes over.
"""

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file

from fitune.cli import main as fitune
from fitune.errors import MissingExtra
from fitune.report import run_page
from fitune.track.metrics import read_metrics

CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "symlink", "unlink", "rmdir", "fstat")


class Killer:
    """Attempts at one run, the damage between them, and what each must do with it."""

    def __init__(self, folder, words, *, steps, seed, kills, only_ending):
        self.folder, self.words, self.steps = folder, words, steps
        self.random = random.Random(seed)
        self.kills, self.only_ending = kills, only_ending
        self.run = folder / "run"
        self.damaged = set()
        """Inodes of the step folders that were damaged: they keep them when they are moved aside."""
        self.metrics_damaged = False
        """Since a run last went on; one that is complete needs its last checkpoint to put them right."""
        self.seen = Counter()
        self.began = time.monotonic()

    def undisturbed(self):
        """The run that all others must end like, with its number of calls and its seconds."""
        straight = self.folder / "straight"
        for name in ("warm", "straight"):
            began = time.monotonic()
            code, calls = self._child(self.folder / name, count_only=True)
            assert code == 0, self._said()
            if (
                name == "warm"
            ):  # else each child would import them again, for many times the seconds of its run
                for module in (self.folder / "modules").read_text().split():
                    with suppress(Exception):
                        import_module(module)
        self.calls, self.seconds = calls, time.monotonic() - began
        self.weights = load_file(straight / "adapter" / "adapter_model.safetensors")
        self.losses = losses_in(straight)
        assert len(self.losses) == self.steps

    def attempt(self, *, to_its_end=False):
        expected, lost = self._expected()
        how = "killed before a call"
        if to_its_end:
            code, _ = self._child(self.run)
        elif self.only_ending:  # evenly, so that no part of it is left out
            code, _ = self._child(self.run, calls=self.killed * self.calls // self.kills)
        elif self.random.random() < 0.7:
            code, _ = self._child(self.run, calls=self.random.randrange(self.calls))
        else:
            code, _ = self._child(self.run, seconds=self.random.uniform(0, self.seconds))
            how = "killed after a time"
        self._require_right_start(expected, lost)
        if code == -signal.SIGKILL and not to_its_end:
            self.seen[how] += 1
            self._damage()
        elif code == 0:
            self._require_same_end()
            self._anew("ended like the undisturbed run")
        elif (
            self.metrics_damaged
            and not self._has_last_checkpoint()
            and "not a line of metrics" in self._said()
        ):
            self._anew("refused: complete, its metrics and its last checkpoint damaged")
        else:
            assert "can be used" in self._said(), self._said()
            assert expected is None
            assert lost or "is not in checkpoints/" in self._said() or "LINE: " in self._said(), self._said()
            self._anew("refused: no checkpoint left, each named")

    def tell(self):
        """JSON of what was seen so far, which is written down, too."""
        seen = json.dumps({"calls": self.calls, "killed": self.killed, **self.seen}, indent=1)
        (self.folder / "seen.json").write_text(seen)
        since = time.monotonic() - self.began
        print(
            f"{self.killed} of {self.kills} killed, {self.seen.total()} seen, {since:.0f} s", file=sys.stderr
        )
        return seen

    @property
    def killed(self):
        return self.seen["killed before a call"] + self.seen["killed after a time"]

    def _child(self, run, *, calls=None, seconds=None, count_only=False):
        """The child's exit code, negative for a signal, and the number of its calls."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os._exit(self._train(run, write, calls, count_only=count_only))
        os.close(write)
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        counted = os.read(read, 100)
        os.close(read)
        return os.waitstatus_to_exitcode(status), int(counted or 0)

    def _train(self, run, report, calls, *, count_only):
        out = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        sys.stdout = sys.stderr = os.fdopen(out, "w", buffering=1)
        counted = [0]
        if calls is not None or count_only:
            is_later = self.only_ending and not (run / "checkpoints" / f"step-{self.steps}").is_dir()
            _die_before(calls, counted, after_step=self.steps if is_later else 0)
        sys.argv = ["fitune", "train", *self.words, "--set", f"output_dir={run}", "--resume"]
        code = 0
        try:
            fitune()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        sys.stdout.flush()
        if count_only:
            os.write(report, str(counted[0]).encode())
            (self.folder / "modules").write_text("\n".join(sorted(sys.modules)))
        return code

    def _said(self):
        return (self.folder / "said").read_text(errors="replace")

    def _steps(self):
        found = (self.run / "checkpoints").glob("step-*")
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def _expected(self):
        """The checkpoint to go on from, and the newer ones that are damaged."""
        lost = []
        for path in self._steps():
            if path.stat().st_ino not in self.damaged:
                return path, lost
            lost.append(path)
        return None, lost

    def _has_last_checkpoint(self):
        last = self.run / "checkpoints" / f"step-{self.steps}"
        return last.is_dir() and last.stat().st_ino not in self.damaged

    def _require_right_start(self, expected, lost):
        said = self._said()
        started = [line for line in said.splitlines() if line.startswith("resuming from ")]
        if started:
            self.metrics_damaged = False
            assert started == [f"resuming from {expected}"], said
            assert all(f"{path.name} is skipped: " in said for path in lost), said
            self.seen["went on past damaged ones"] += bool(lost)
        elif expected is not None:
            assert "starting from the beginning" not in said, said

    def _require_same_end(self):
        found = load_file(self.run / "adapter" / "adapter_model.safetensors")
        assert found.keys() == self.weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in self.weights.items())
        if not self.metrics_damaged or self._has_last_checkpoint():
            assert losses_in(self.run) == self.losses
        report = json.loads((self.run / "report.json").read_text())
        assert (report["status"], report["reason"]) == ("complete", "")
        assert (self.run / "report.html").is_file()

    def _anew(self, why):
        self.seen[why] += 1
        shutil.rmtree(self.run)
        self.damaged.clear()
        self.metrics_damaged = False

    def _damage(self):
        """With even odds one kind of damage to one file, or to a whole checkpoint."""
        if self.only_ending or self.random.random() < 0.5:
            return
        files = [path for step in self._steps() for path in sorted(step.iterdir())]
        files += [self.run / "checkpoints" / "LINE", self.run / "metrics.jsonl"] * 2
        files = [path for path in files if path.is_file() and path.stat().st_size]
        if not files:
            return
        kind = self.random.choice([flip, truncate, delete, swap_files, delete_step, swap_steps])
        steps = self._steps()
        if kind in (delete_step, swap_steps) and len(steps) > 1:
            touched = kind(steps, self.random)
        elif kind is swap_files:
            touched = swap_files(*self.random.sample(files, 2)) if len(files) > 1 else []
        else:
            damage = kind if kind in (flip, truncate, delete) else flip
            touched = damage(self.random.choice(files), self.random)
        self.metrics_damaged |= self.run in touched
        for path in touched:
            if path.name.startswith("step-") and path.is_dir():
                self.damaged.add(path.stat().st_ino)
        # The file system gives the number of a removed folder to the next one.
        self.damaged &= {path.lstat().st_ino for path in (self.run / "checkpoints").iterdir()}
        self.seen[f"damage: {kind.__name__}"] += 1


def losses_in(run):
    return [(step.step, step.loss, step.eval_loss) for step in read_metrics(run / "metrics.jsonl")]


def flip(file, chance):
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return [file.parent]


def truncate(file, chance):
    os.truncate(file, chance.randrange(file.stat().st_size))
    return [file.parent]


def delete(file, chance):
    file.unlink()
    return [file.parent]


def swap_files(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return [] if first == second else [one.parent, other.parent]


def delete_step(steps, chance):
    shutil.rmtree(chance.choice(steps))
    return []


def swap_steps(steps, chance):
    one, other = chance.sample(steps, 2)
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)
    return [one, other]


def _die_before(calls, counted, *, after_step):
    """Count the calls behind the checkpoint of this step, and be killed in the place of number ``calls``."""
    is_ending = [after_step == 0]

    def counting(name):
        original = getattr(os, name)

        def call(*args, **kwargs):
            is_ending[0] = is_ending[0] or (
                "checkpoints/.tmp-latest" in str(args[:1])
                and (Path(str(args[0])).parent / f"step-{after_step}").is_dir()
            )
            if is_ending[0]:
                if counted[0] == calls:
                    os.kill(os.getpid(), signal.SIGKILL)
                counted[0] += 1
            return original(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        counting(name)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only-ending", action="store_true")
    wanted = parser.parse_args()
    settings = {
        "model": wanted.model, "data": wanted.data, "tuning": "lora", "lora_r": 4, "lora_dropout": 0.1,
        "precision": "fp32", "gpu": "cpu", "seq_len": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2, "max_steps": wanted.steps, "save_steps": 1, "keep_checkpoints": 3, "samples": 0,
        "val_fraction": 0.2, "eval_steps": 3,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    run_page.draw_pictures = without_pictures
    killer = Killer(
        wanted.folder, words, steps=wanted.steps, seed=wanted.seed, kills=wanted.kills, only_ending=wanted.only_ending,
    )  # fmt: skip
    killer.undisturbed()
    gc.freeze()  # children share the pages that nobody collects
    gc.disable()
    while killer.killed < wanted.kills:
        killer.attempt()
        killer.tell()
    killer.attempt(to_its_end=True)
    print(killer.tell())


def without_pictures(run):
    """They take longer than the training."""
    raise MissingExtra("pictures", extra="plots")


if __name__ == "__main__":
    main()

"""The command line: parse, call, print. Nothing imports it, and it imports rooms only when a command needs them."""

from fitune.cli.entry import main

__all__ = ["main"]

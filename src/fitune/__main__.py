"""The ``fitune`` command, also as ``python -m fitune``."""

import signal


def main() -> None:
    """Run it. Until its own handlers stand, Ctrl-C ends the process as the system does, without a traceback: importing
    the commands takes most of a short one."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # one that is ignored (nohup) stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fitune.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()

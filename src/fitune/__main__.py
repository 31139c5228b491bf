"""``python -m fitune`` is the ``fitune`` command."""

from fitune.cli import main

if __name__ == "__main__":
    main()

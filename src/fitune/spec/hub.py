"""True if the Hugging Face Hub can be asked: its client retries for a minute where there is no network."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

HUB_TIMEOUT_S = 5.0


def is_offline() -> bool:
    """True if the user switched the Hub off."""
    switches = (os.environ.get(key, "").lower() for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "true", "yes", "on") for value in switches)


def answers(url: str) -> bool:
    """True if the host answers at all, whatever it answers."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        urlopen(Request(url, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except HTTPError:
        return True
    except (URLError, OSError):
        return False
    return True


@contextmanager
def no_waiting_for_the_hub() -> Iterator[str]:
    """Inside, the Hub's client looks into its cache alone when the Hub is off or does not answer.

    Yields why it is not asked, for an error message; empty when it is.
    """
    from huggingface_hub import constants

    if is_offline() or constants.HF_HUB_OFFLINE:
        yield "the Hub is switched off (HF_HUB_OFFLINE)"
        return
    if answers(constants.ENDPOINT):
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield f"{constants.ENDPOINT} does not answer"
    finally:
        constants.HF_HUB_OFFLINE = False

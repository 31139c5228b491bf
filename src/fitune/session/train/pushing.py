"""An export goes to the Hugging Face Hub: asked for before a run starts, sent when it has ended.

The Hub's client takes the token from where it keeps it (HF_TOKEN, or the file of `hf auth login`); it is in no recipe
and in no message.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fitune.errors import FituneError, RecipeError, StoreError, is_failure, work_under_way
from fitune.recipe.types import as_hub_name
from fitune.session.events import Emit, Note
from fitune.values.hub import answers, is_offline
from fitune.values.serial import read_object

_TOKENS = "https://huggingface.co/settings/tokens"


def ready_repository(name: str, *, public: bool) -> tuple[str, bool]:
    """The full name of the repository ``name``, and True if everybody may read it; it is made where it is not there.

    Raises RecipeError for what can be seen here and for a public repository that nobody asked for, StoreError for what
    the Hub refuses: the sending itself asks the same.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token

    try:
        as_hub_name(name)
    except ValueError as error:
        raise RecipeError(f"push_to_hub = {name!r} {error}", hint="push_to_hub: OWNER/NAME") from None
    if is_offline() or constants.HF_HUB_OFFLINE:
        raise RecipeError(
            f"push_to_hub = {name}, but the Hub is switched off (HF_HUB_OFFLINE)",
            hint="HF_HUB_OFFLINE=0, or no push_to_hub now: an export can be sent later",
        )
    if not get_token():
        raise RecipeError(
            f"push_to_hub = {name}, and there is no token of the Hub",
            hint=f"hf auth login, or HF_TOKEN with a token that may write ({_TOKENS})",
        )
    if not answers(constants.ENDPOINT):
        raise StoreError(
            f"push_to_hub = {name}: {constants.ENDPOINT} does not answer",
            hint="try again where there is a network; HF_ENDPOINT names another server",
        )
    api = HfApi()
    with _in_words(name):
        repository = api.create_repo(name, private=not public, exist_ok=True).repo_id
        # Before anything is sent the Hub is asked how: it refuses whoever may not write, and this file is not sent.
        api.preupload_lfs_files(repository, [CommitOperationAdd("README.md", b"# a model\n")])
        is_public = not api.model_info(repository).private
    if is_public and not public:
        raise RecipeError(
            f"push_to_hub = {repository} is there, and everybody can read it",
            hint="hub_public: true (--hub-public), or another name",
        )
    return repository, is_public


def push(folder: Path, name: str, *, public: bool, again: str, emit: Emit) -> None:
    """Send what ``folder`` holds and the repository does not. ``again``: the command that sends it later.

    Raises StoreError, with where the export is and what to do.
    """
    from huggingface_hub import HfApi, constants

    with work_under_way():
        try:
            repository, is_public = ready_repository(name, public=public)
            with _in_words(repository):
                HfApi().upload_folder(
                    repo_id=repository, folder_path=folder, commit_message=f"{folder.name} by fitune"
                )
        except FituneError as error:
            raise StoreError(
                f"not on the Hub: {error.message}; the export is whole in {folder}",
                hint=f"{again} sends what is missing; {error.hint or ''}".rstrip("; "),
            ) from error
    readers = "everybody can read it" if is_public else "private"
    url = f"{constants.ENDPOINT}/{repository}"
    emit(Note(f"on the Hub: {url} ({readers})", {"hub": url}))
    config = folder / "adapter_config.json"
    base = str(read_object(config).get("base_model_name_or_path")) if config.is_file() else ""
    if base.startswith("/"):
        emit(Note(f"note: its adapter_config.json names the base by a folder of this machine, {base}"))


def push_again(run: Path | str, name: str, *, public: bool) -> str:
    """The command that sends what a run has exported."""
    return f"fitune export {shlex.quote(str(run))} --push-to-hub {name}{' --hub-public' if public else ''}"


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Inside, whatever the Hub's client raises becomes a StoreError with the next step."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        if not is_failure(error):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, HfHubHTTPError):
            cause = cause.__cause__
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
        said = (getattr(cause, "server_message", None) or str(cause)).strip().partition("\n")[0]
        why, hint = _REFUSALS.get(status, (said or type(cause).__name__, "the same command once more"))
        if status == 403 and getattr(cause, "server_message", None):
            why = f"{why}: {said}"
        raise StoreError(f"push_to_hub = {name}: {why}", hint=hint) from error


_REFUSALS = {
    401: ("the Hub does not know the token", f"hf auth login, or another HF_TOKEN ({_TOKENS})"),
    403: (
        "the token may not write there",
        f"a token with write access to that owner ({_TOKENS}), or a repository of your own",
    ),
}
"""Status of the Hub's answer -> what it means, and what helps."""

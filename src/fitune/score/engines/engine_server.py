"""The engine behind a URL: any server that speaks OpenAI's completions API (vLLM, SGLang, llama.cpp, TGI, a provider).

Prompts go as token ids, so they are never tokenised again; a server that refuses ids gets the rendered text. Each
request is tried a few times: what the network or a busy server spoils is retried after a pause that doubles, what the
server refuses is an error of that row. No row waits longer than its tries together.
"""

import http.client
import json
import logging
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fitune.credentials import SHORTEST_SECRET, credential_in, without_credentials
from fitune.errors import RecipeError
from fitune.score.engines.engine import (
    Completion,
    Continuation,
    EngineDied,
    FinishReason,
    Likelihood,
    Request,
    failed,
)
from fitune.values.answering import ROWS_AT_ONCE

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses of which another try may come back with an answer."""
_OF_ALL_ROWS = (301, 302, 303, 307, 308, 401, 403, 404)
"""Statuses that every other row would meet, too."""
_WHAT_TO_CHECK = (
    "check that the server runs, --url (without /completions), --served-model and the key in OPENAI_API_KEY"
)
_LONGEST_ANSWER = 64 * 2**20
"""Bytes of a response that are read."""
_LONGEST_PAUSE_S = 60.0
_LARGEST = 1e30
"""Magnitude of a log-probability; NaN, infinity and longer whole numbers are none."""


class _Refused(Exception):
    """The server said no to this row, for good."""


class _Spoiled(Exception):
    """This try brought nothing, another may. ``pause_s``: what the server asked for."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


class _NotElsewhere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the next address would get the key, and a GET without the prompt."""

    def redirect_request(self, *_: Any) -> None:
        """None, which urllib turns into an HTTPError with the redirection's status."""
        return None


_OPENER = urllib.request.build_opener(_NotElsewhere)


@dataclass(slots=True, kw_only=True)
class ServerEngine:
    """``url`` ends before ``/completions``: http://host:8000/v1. ``to_text`` is for servers that take no ids."""

    url: str
    model: str
    to_text: Callable[[tuple[int, ...]], str]
    stop_ids: frozenset[int] = frozenset()
    key: str = ""
    vocabulary: int = 2**31
    """Number of token ids that ``to_text`` can read."""
    batch_size: int = ROWS_AT_ONCE
    """Requests under way at a time."""
    tries: int = 5
    timeout_s: float = 600.0
    pause_s: float = 1.0
    """Before the second try; doubled before each further one."""
    takes_ids: bool = True
    takes_extras: bool = True
    """True as long as the server has not refused vLLM's fields (stop_token_ids, return_token_ids)."""
    _dead: str = field(default="", init=False)
    _failures: int = field(default=0, init=False)
    _has_answered: bool = field(default=False, init=False)
    _told_until: float = field(default=0.0, init=False)

    def answer(self, requests: Sequence[Request], ahead: Sequence[Request] = ()) -> Iterator[Completion]:
        """As they come back, ``batch_size`` requests at a time. Raises EngineDied once the server is gone."""
        return self._each(self._answer, requests)

    def loglikelihoods(self, continuations: Sequence[Continuation]) -> Iterator[Likelihood]:
        """One request for each continuation, ``batch_size`` at a time. Raises EngineDied once the server is gone."""
        return self._each(self._loglikelihood, continuations)

    def _each(self, ask: Callable[[Any], T | None], asked: Sequence[Any]) -> Iterator[T]:
        """Call ``ask`` for every item, ``batch_size`` at a time; yields its results as they come back. Closing it sends
        nothing more."""
        with ThreadPoolExecutor(self.batch_size) as pool:
            begun = [pool.submit(ask, one) for one in asked]
            try:
                for done in as_completed(begun):
                    if found := done.result():
                        yield found
                    if self._dead:
                        raise EngineDied(self._dead, hint=_WHAT_TO_CHECK)
            finally:
                for waiting in begun:
                    waiting.cancel()

    def close(self) -> None:
        """Does nothing: each request has its own connection."""

    def _answer(self, request: Request) -> Completion | None:
        """The answer; None once the server is given up."""
        if self._dead:
            return None
        sampling = request.sampling
        if not request.prompt_ids:
            return failed(request, "empty_prompt", "the prompt has no tokens")
        body = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "logprobs": 0}
        if sampling.temperature:
            body |= {"top_p": sampling.top_p, "seed": request.seed % 2**31}
        try:
            found = self._ask(request.prompt_ids, body, lambda choice: self._completion(request, choice))
            self._has_answered = True
            return found
        except _Refused as refused:
            return self._refused(request, str(refused))
        except _Spoiled as spoiled:
            return self._failed(request, "server_failed", f"{spoiled}, {self.tries} times")

    def _refused(self, asked: Request | Continuation, why: str) -> Any:
        """The failed result of a row that the server does not take; one that is too long says nothing of the others."""
        if "context" in why.lower():
            return failed(asked, "prompt_too_long", why)
        return self._failed(asked, "server_refused", why)

    def _failed(self, asked: Request | Continuation, code: str, why: str) -> Any:
        """The failed result of a row. A server that fails for as many rows as are under way, and never answered one, is
        given up: it is not asked for the rest, however slowly its answers are taken."""
        self._failures += 1
        if not self._has_answered and self._failures >= self.batch_size:
            self._dead = self._dead or why
        return failed(asked, code, why)

    def _loglikelihood(self, asked: Continuation) -> Likelihood | None:
        """The likelihood from the prompt's log-probabilities (``echo``), which vLLM gives and most providers do not;
        None once the server is given up."""
        if self._dead:
            return None
        text = slice(len(asked.prompt_ids), len(asked.ids))
        body = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1, "echo": True}
        tells_nothing = (
            "the server does not tell log-probabilities of the prompt; vLLM's does, and so do --engine transformers "
            "and vllm"
        )
        try:
            found = self._ask(asked.ids, body, lambda choice: choice["logprobs"])
            if not self.takes_ids:
                raise _Refused(
                    "the server takes no token ids, so its tokens may be others than those asked about"
                )
            logprobs, best = found["token_logprobs"][text], found.get("top_logprobs", [])[text]
            if len(logprobs) != len(asked.token_ids) or not all(map(_is_logprob, logprobs)):
                raise _Refused(tells_nothing)
            greedy = [
                max(top.values()) <= logprob for top, logprob in zip(best, logprobs, strict=False) if top
            ]
        except _Spoiled as spoiled:
            return self._failed(asked, "server_failed", f"{spoiled}, {self.tries} times")
        except (_Refused, KeyError, TypeError, AttributeError) as error:
            why = str(error) if isinstance(error, _Refused) else tells_nothing
            return self._refused(asked, why)
        self._has_answered = True
        is_greedy = len(greedy) == len(logprobs) and all(greedy)
        return Likelihood(id=asked.id, logprobs=tuple(logprobs), is_greedy=is_greedy)

    def _ask(
        self, prompt_ids: tuple[int, ...], body: dict[str, Any], read: Callable[[dict[str, Any]], T]
    ) -> T:
        """The one choice of a response as ``read`` reads it. Fields and ids that the server does not take are left out
        from then on."""
        for attempt in range(self.tries):
            extras = (
                {"stop_token_ids": sorted(self.stop_ids), "return_token_ids": True}
                if self.takes_extras
                else {}
            )
            prompt = list(prompt_ids) if self.takes_ids else self.to_text(prompt_ids)
            sent = bool(extras), isinstance(prompt, list)
            try:
                response = self._post({"model": self.model, "prompt": prompt, **body, **extras})
                choices = response.get("choices") if isinstance(response, dict) else None
                if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
                    raise _Spoiled(f"the server answered {json.dumps(response)[:80]}, which has no choices")
                return read({"usage": response.get("usage")} | choices[0])
            except _Refused as refused:
                # another request may have met the refusal while this one was under way
                if not self._takes_less(str(refused)) and sent == (self.takes_extras, self.takes_ids):
                    raise
            except _Spoiled as spoiled:
                if attempt + 1 == self.tries:
                    raise
                time.sleep(self._told_pause(spoiled.pause_s, self.pause_s * 2**attempt))
        raise _Spoiled("the server takes neither token ids nor text")

    def _told_pause(self, asked_s: float, own_s: float) -> float:
        """Seconds to wait. That the server asks for a pause is said, once for all the requests that meet it."""
        wait_s, now = min(max(asked_s, own_s), _LONGEST_PAUSE_S), time.monotonic()
        if asked_s and now >= self._told_until:
            self._told_until = now + wait_s
            logger.warning(
                f"{self.url} asks for a pause of {asked_s:.0f} s: the next try is in {wait_s:.0f} s"
            )
        return wait_s

    def _takes_less(self, refused: str) -> bool:
        """True when the refusal was of fields or ids that can be left out, which they are from now on."""
        words = refused.lower()
        if self.takes_extras and re.search("token_ids|extra|unknown|unrecognized", words):
            self.takes_extras = False
            return True
        if self.takes_ids and "prompt" in words and re.search("str|type", words):
            self.takes_ids = False
            return True
        return False

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        asked = urllib.request.Request(
            f"{self.url.rstrip('/')}/completions", json.dumps(body).encode(), headers
        )
        try:
            with _OPENER.open(asked, timeout=self.timeout_s) as response:
                content = self._without_key(response.read(_LONGEST_ANSWER + 1))
        except urllib.error.HTTPError as error:
            raise self._of_status(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise _Spoiled(
                f"{self.url}: {getattr(error, 'reason', None) or error or type(error).__name__}"
            ) from None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):  # brackets without end
            raise _Spoiled(f"{self.url} answered {content[:60]!r}, which is no JSON") from None

    def _without_key(self, content: bytes) -> bytes:
        """``content`` of a response; a server may send back the headers that it got."""
        return (
            content.replace(self.key.encode(), b"[hidden]") if len(self.key) >= SHORTEST_SECRET else content
        )

    def _of_status(self, error: urllib.error.HTTPError) -> Exception:
        try:
            said = self._without_key(error.read(20_000)).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException):
            said = ""
        reason = self._without_key(str(error.reason).encode()).decode()
        text = without_credentials(f"{self.url} answered {error.code} {reason}: {said[:300]}")
        if error.code in _BUSY:
            pause = (error.headers.get("Retry-After") or "").strip()  # else a date or nonsense
            return _Spoiled(text, float(pause) if pause.isdecimal() else 0.0)
        if error.code in _OF_ALL_ROWS:
            self._dead = text
        return _Refused(text)

    def _completion(self, request: Request, choice: dict[str, Any]) -> Completion:
        """The answer in ``choice``, with the token ids and log-probabilities beside it that can be its own."""
        text, reason, beside = choice.get("text"), choice.get("finish_reason"), choice.get("logprobs")
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise _Spoiled(f"the server answered text {text!r:.40} and finish_reason {reason!r:.20}")
        most = request.sampling.max_new_tokens + 1  # some servers count the end token apart

        def of_tokens(told: Any, is_one: Callable[[Any], bool]) -> list[Any]:
            """The list that was told, a value for each token; empty where it cannot be one."""
            return told if isinstance(told, list) and len(told) <= most and all(map(is_one, told)) else []

        ids = of_tokens(choice.get("token_ids"), lambda id_: type(id_) is int and 0 <= id_ < self.vocabulary)
        logprobs = of_tokens(beside.get("token_logprobs") if isinstance(beside, dict) else None, _is_logprob)
        usage = choice["usage"] if isinstance(choice["usage"], dict) else {}
        counted = usage.get("completion_tokens")
        counted = counted if type(counted) is int and 0 <= counted <= most else 0
        finish: FinishReason = "stop" if reason == "stop" else "length"
        return Completion(
            id=request.id, token_ids=tuple(ids), logprobs=tuple(map(float, logprobs)), finish_reason=finish,
            tokens=len(ids) or len(logprobs) or counted, text=None if ids else text,
        )  # fmt: skip


def require_url(url: str) -> str:
    """``url`` as it is. Raises RecipeError when it is none of http or https, or holds credentials."""
    if kind := credential_in(url):
        raise RecipeError(
            f"url holds {kind}, and it is saved with the answers", hint="OPENAI_API_KEY is for the key"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # [::1 without its bracket, a port that is no number
        is_address = False
    if not is_address:
        raise RecipeError(f"url {url!r} is no address of a server", hint="http://localhost:8000/v1")
    return url


def _is_logprob(value: Any) -> bool:
    """True for the logarithm of a probability; servers round a certain token's to a little above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < 0.01

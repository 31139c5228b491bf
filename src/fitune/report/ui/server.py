"""The local server: three addresses below a random token, on 127.0.0.1 alone. It reads and writes no files."""

import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from fitune.errors import HardwareError, require_library

Answer = Callable[[Mapping[str, str]], str]
"""A question (the address's query) becomes HTML."""
LONGEST_QUERY = 40_000
"""Characters: a pasted config.json has 1,000 to 5,000."""
HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine in an address of the page."""
_WRONG_TOKEN = """This address is of a fitune ui that has ended, or a part of it is missing.

Open the whole address that fitune ui printed, or start a page with this one's question:

    fitune ui 'THE LINK'
"""
_HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


def local_app(answers: Mapping[str, Answer], *, token: str) -> Any:
    """A Starlette app with ``/TOKEN/NAME`` for each answer. Other hosts, origins, and tokens are refused."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def respond(request: Any) -> Response:
        """Returns the page that the path names; 403 for another host, origin or token, 404 or 414 for a bad request."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        is_here = host.rpartition(":")[0] in HOSTS
        if not is_here or origin not in (None, f"http://{host}"):
            return PlainTextResponse("this page is for this machine alone", status_code=403, headers=_HEADERS)
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return PlainTextResponse(_WRONG_TOKEN, status_code=403, headers=_HEADERS)
        answer = answers.get(request.path_params["name"])
        if answer is None:
            return PlainTextResponse(
                "open the whole address that fitune ui printed", status_code=404, headers=_HEADERS
            )
        if len(request.url.query) > LONGEST_QUERY:
            return PlainTextResponse("the question is too long", status_code=414, headers=_HEADERS)
        return HTMLResponse(answer(dict(request.query_params)), headers=_HEADERS)

    return Starlette(routes=[Route("/{token}/{name:path}", respond)])


def serve(answers: Mapping[str, Answer], *, port: int, tell: Callable[[str], object]) -> None:
    """Answer until Ctrl-C. Raises HardwareError for a port that is taken, MissingExtra without the extra."""
    for library in ("starlette", "uvicorn"):
        require_library(library, needed_by="the planner's page", extra="ui")
    import uvicorn

    token = secrets.token_urlsafe(18)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
            listening.listen()  # before the address is told: who opens it at once waits, and is not refused
        except OSError as error:
            raise HardwareError(
                f"--port {port}: {error.strerror or error}", hint="--port 0 takes a free one"
            ) from None
        tell(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/")
        config = uvicorn.Config(local_app(answers, token=token), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])

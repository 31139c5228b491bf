"""The local pages: the planner with its bars and tables, the runs of a folder, and the server that shows them.

All texts are escaped. The server has some addresses below a random token, on 127.0.0.1 alone. It reads and writes no
files.
"""

import math
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fitune.errors import HardwareError, require_library
from fitune.report.page import render
from fitune.report.plots import thin
from fitune.units import format_bytes


def bars_of(rows: Mapping[str, Mapping[str, int]], *, limit: int) -> dict[str, Any]:
    """Rows of bytes by name as bars on one scale, in thousandths of its length, against ``limit`` bytes, which is what
    a device has for them; and the colours of the names."""
    most = max(limit, *(sum(sizes.values()) for sizes in rows.values())) * 1.04
    bars = []
    colours: dict[str, int] = {}
    for row, sizes in rows.items():
        start, parts, total = 0.0, [], sum(sizes.values())
        for number, (name, size) in enumerate(sizes.items(), 1):
            width = 1000 * size / most
            if width >= 0.5:
                tip = f"{row}: {name} {format_bytes(size)} of {format_bytes(total)}"
                parts.append({"colour": number, "start": start, "width": width, "tip": tip})
                colours[name] = number
            start += width
        bars.append({"name": row, "value": format_bytes(total), "over": total > limit, "parts": parts})
    legend = dict(sorted(colours.items(), key=lambda entry: entry[1]))
    return {"bars": bars, "limit": 1000 * limit / most, "limit_text": format_bytes(limit), "legend": legend}


answer_html = partial(render, "planner_answer.html", error=None, nothing=None, facts=())
"""The verdict, the pictures, the recipe and the command, or the error."""
ways_html = partial(render, "planner_ways.html")
"""The table of ways that fit, and the first screen of the terminal."""
rent_html = partial(render, "planner_rent.html")
"""Rows of the table of cards to rent."""
clusters_html = partial(render, "planner_clusters.html", error=None)
"""The table of one's own clusters, or the error of the fleet file that was pasted."""
runs_table_html = partial(render, "runs_table.html")
"""A row for each run."""
planner_html = partial(
    render,
    "planner.html",
    title="fitune: what fits",
    scripts=("hover.js", "planner.js"),
    cards=(),
    runs=False,
)
"""The whole page. ``answer`` and ``ways`` are HTML; a page that is not ``live`` is a file without a form.
``cards``: names of those that can be rented; ``runs``: True where there is a page of runs beside this one."""
runs_html = partial(render, "runs.html", scripts=("runs.js",))
"""The page of a folder's runs, which asks for ``table`` again while it is seen."""
run_refused_html = partial(render, "run_refused.html", title="fitune: no report")
"""The page in place of a run's report, which says ``why``."""


def curve_of(points: Sequence[tuple[int, float]]) -> str:
    """Points of an SVG polyline in a box of 100 × 30, the highest value at its top; empty for fewer than two values.
    Values that are not finite are left out."""
    finite = thin([(step, value) for step, value in points if math.isfinite(value)])
    if len(finite) < 2:
        return ""
    first, last = finite[0][0], finite[-1][0]
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    return " ".join(
        f"{100 * (step - first) / (last - first or 1):.1f},{29 - 28 * (value - low) / (high - low or 1):.1f}"
        for step, value in finite
    )


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
        refused = partial(PlainTextResponse, headers=_HEADERS)
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        is_here = host.rpartition(":")[0] in HOSTS
        if not is_here or origin not in (None, f"http://{host}"):
            return refused("this page is for this machine alone", status_code=403)
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return refused(_WRONG_TOKEN, status_code=403)
        answer = answers.get(request.path_params["name"])
        if answer is None:
            return refused("open the whole address that fitune ui printed", status_code=404)
        if len(request.url.query) > LONGEST_QUERY:
            return refused("the question is too long", status_code=414)
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

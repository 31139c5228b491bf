"""HTML that escapes by construction: text is made safe when it enters an element, ``Html`` already is."""

import html
from collections.abc import Iterable, Sequence

Content = str | None


class Html(str):
    """Markup that is safe to put in the page. Everything else is escaped."""

    __slots__ = ()


def safe(content: Content) -> Html:
    if content is None:
        return Html("")
    return content if isinstance(content, Html) else Html(html.escape(content))


def element(name: str, *children: Content, **attributes: str) -> Html:
    """``element("p", "a < b", class_="note")`` is ``<p class="note">a &lt; b</p>``."""
    opening = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Html(f"<{name}{opening}>{join(children)}</{name}>")


def join(children: Iterable[Content]) -> Html:
    return Html("".join(safe(child) for child in children))


def section(title: str, *children: Content, note: str = "") -> Html:
    """A titled part of the page; nothing at all when it has no content."""
    if not any(children):
        return Html("")
    lead = element("p", note, class_="lead") if note else None
    return element("section", element("h2", title), lead, *children)


def table(
    head: Sequence[str], rows: Iterable[Sequence[Content]], *, numbers: int = 0, class_: str = ""
) -> Html:
    """The last ``numbers`` columns hold figures and are set to the right; the first names the row.

    With class ``cards`` each row of a narrow page is a list of its own: its cells carry the names of their columns.
    """
    first_number = len(head) - numbers

    def cells(name: str, row: Sequence[Content]) -> Html:
        return join(
            element(
                name if place else "th", cell, class_="number" if place >= first_number else "",
                data_label=head[place] if class_ == "cards" and name == "td" else "",
            )
            for place, cell in enumerate(row)
        )  # fmt: skip

    body = join(element("tr", cells("td", row)) for row in rows)
    top = element("thead", element("tr", cells("th", head))) if any(head) else None
    # a wrapper that scrolls: a wide table must not widen the page on a phone
    return element("div", element("table", top, element("tbody", body), class_=class_), class_="scroll")


def items(entries: Iterable[Content]) -> Html:
    lines = [element("li", entry) for entry in entries]
    return element("ul", *lines) if lines else Html("")


def figure(title: str, picture: Content, *, note: str = "") -> Html:
    caption = element("figcaption", title, element("span", note) if note else None)
    return element("figure", caption, picture)


def code(text: str) -> Html:
    return element("pre", element("code", text))


def details(summary: str, *children: Content) -> Html:
    return element("details", element("summary", summary), *children)

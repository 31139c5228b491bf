"""What a notebook shows of a value."""


class ShownInNotebooks:
    """A value that a notebook shows in words: the first screen of a plan, the outcome of a run, grades."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        import fitune  # words are made in rooms above this one, and only a notebook asks for them

        return fitune._notebook_html(self)  # type: ignore[arg-type]

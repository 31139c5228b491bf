"""What a row asks for and no plan can say."""


class Unrepresented(Exception):
    """The reason, in words: such a row is counted, not hidden."""

"""What a draft made of keys and options."""

from areal.importers.draft import Draft


def values(draft: Draft, *options: str) -> tuple[object, ...]:
    """The values of options; None where the draft has none."""
    return tuple(draft.options[option].value if option in draft.options else None for option in options)


def fates(draft: Draft, *keys: str) -> list[str]:
    return [draft.notes[key].fate for key in keys]

"""What each row of a pass sees, in compiled code: readers of the lists that models.attention.slot_lists makes."""

from __future__ import annotations

from paceline.models.cpu import offsets as at
from paceline.models.cpu.vectors import read
from paceline.utils import part_of_compiled


@part_of_compiled
def own_slots(seen: int, row: int) -> tuple[int, int]:
    """Address and length of a row's own list, in compiled code."""
    entry = seen + row * at.SEEN_FIELDS
    return read(entry + at.OWN), read(entry + at.OWN_COUNT)


@part_of_compiled
def shared_slots(seen: int, row: int) -> tuple[int, int]:
    """The same of the list that it shares with the rows beside it."""
    entry = seen + row * at.SEEN_FIELDS
    return read(entry + at.SHARED), read(entry + at.SHARED_COUNT)


@part_of_compiled
def common_own_slots(seen: int, row: int, stop: int) -> tuple[int, int]:
    """How much of their own lists rows share, and the length of the longest; 0, 0 where these do not go on from the
    shared one.
    """
    shared, count = shared_slots(seen, row)
    _, least = own_slots(seen, row)
    most = least
    for other in range(row, stop):
        listed, more = own_slots(seen, other)
        if listed != shared + 8 * count:
            return 0, 0
        least, most = min(least, more), max(most, more)
    return least, most

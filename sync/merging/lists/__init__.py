"""Lists of the entries of a vector that are not zero: their places and their values, encoded."""

from sync.merging.lists._entries import AsPublished, ListCodec, Lists, ListsAndState
from sync.merging.lists._places import Chosen, Places

__all__ = ["AsPublished", "Chosen", "ListCodec", "Lists", "ListsAndState", "Places"]

"""State of the federation: loaded at the start, and changed and stored in transactions."""

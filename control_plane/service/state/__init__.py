"""The federation as it is known: loaded, changed and stored in one piece."""

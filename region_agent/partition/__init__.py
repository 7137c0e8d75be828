"""One job in this region: its state machine, and what carries out what that decides."""

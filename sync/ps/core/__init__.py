"""The decisions of a parameter server: a state machine, without clock, sockets or files."""

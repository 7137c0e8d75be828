"""What a parameter server decides: a state machine, without clock, sockets or files."""

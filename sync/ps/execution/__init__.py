"""What a parameter server does for its state machine: numbers, disk and channel."""

"""Executes the actions of a parameter server's state machine: arithmetic on the model, files, the channel."""

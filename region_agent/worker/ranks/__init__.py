"""Several devices of one worker: a process for each, which compute the gradients of a step together."""

"""A function on a cloud's function service: one invocation of it is one replica, which connects to its gateway."""

"""How models meet: flat tensors, channels, collectives, WAN policies and the parameter server."""

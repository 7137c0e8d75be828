"""A partition: the state machine of one job in this region, and the code that carries out its actions."""

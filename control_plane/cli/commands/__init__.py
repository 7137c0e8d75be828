"""The verbs of `control-plane`."""

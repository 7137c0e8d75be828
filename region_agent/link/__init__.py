"""The session with the control plane: identity, commands in, reports and logs out."""

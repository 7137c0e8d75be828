"""The agent's session with the control plane: it receives commands and sends reports and logs."""

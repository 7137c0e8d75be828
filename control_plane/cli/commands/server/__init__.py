"""Commands for the machine of the control plane: run it, back it up, replace its authority."""

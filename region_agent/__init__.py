"""The region's daemon: connection to the control plane, function gateway, worker function, local policy."""

"""Transfer of large updates between parameter servers over parallel, resumable TLS streams."""

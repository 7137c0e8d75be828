"""Commands that need no control plane: templates, schema, version, completion."""

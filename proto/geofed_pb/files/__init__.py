"""Files that people and processes write: strict YAML, what is durable, compressed data, output files."""

"""The parameter server: holds a partition's model, merges its workers, exchanges with the other regions."""

"""Commands that show what jobs have done, or write it into files."""

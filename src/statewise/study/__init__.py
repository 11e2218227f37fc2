"""Studies: arms x seeds of one base under one budget, from a TOML file to a table and a report."""

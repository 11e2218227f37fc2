"""Diagnostics: tables computed from finished runs. None is built in yet; plug-ins register theirs by `kind`."""

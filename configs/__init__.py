"""Plain YAML for ``lightning-compress``; each file is found by its name: ``--config demo``."""

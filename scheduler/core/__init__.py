"""The pure core: no clock, no chance, no I/O. Everything that happens to a task is decided and folded here."""

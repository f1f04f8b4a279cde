"""One file per family of processes; `registry.py` lists them."""

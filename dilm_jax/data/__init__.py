"""Data: sources of clean examples, and the loader that batches them."""

"""Low-level host memory: mappings, huge pages, the page cache, integer columns."""

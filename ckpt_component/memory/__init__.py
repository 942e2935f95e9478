"""Host memory below Python: mappings, huge pages, the page cache, columns of integers."""

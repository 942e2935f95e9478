"""Memory below Python: mappings, huge pages, the page cache, calls of the C library. The only place with ctypes."""

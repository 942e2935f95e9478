"""Reports that compare the jobs of a sweep: a table, a CSV file, and a picture.

A job writes its `result.json` (`result.py`); the report reads these files, even when the sweep failed or was killed.
"""

"""What the jobs of a sweep came to, side by side: a table, a CSV file, and a picture.

A job writes its `result.json` (`result.py`); the report reads these files, even when the sweep failed or was killed.
"""

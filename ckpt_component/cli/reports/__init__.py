"""Reports: what saving cost the runs of a folder, and a comparison of the jobs of a sweep.

Runs have their events. A job of a sweep writes its `result.json` (`result.py`); the report reads these files, even when
the sweep failed or was killed.
"""

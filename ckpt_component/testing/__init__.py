"""The fault-injection rig behind the file-system seam."""

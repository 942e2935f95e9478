"""Safe readers for checkpoints written by other libraries."""

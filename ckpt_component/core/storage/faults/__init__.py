"""A file system that fails at chosen operations, for tests; production never imports it."""

#: Environment variable: which operations fail, and how; see `failpoints`.
SPEC = "CKPT_FAILPOINT"
#: Environment variable: the file in which all processes record their operations.
LOG = "CKPT_FAILPOINT_LOG"

"""One replica of a pool in this process: for `dspark replica`, for Ray Serve, for tests."""

from dspark.deploy.roles.light import without_torch
from dspark.deploy.roles.place import replica_id
from dspark.deploy.roles.role import role
from dspark.deploy.roles.running import Load, RunningRole

__all__ = ["Load", "RunningRole", "replica_id", "role", "without_torch"]

"""What ``tests`` does before and after each test holds here too."""

from tests.conftest import no_job_is_left

__all__ = ["no_job_is_left"]

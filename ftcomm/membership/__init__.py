"""The sources of views for communicators that are not the group of the job."""

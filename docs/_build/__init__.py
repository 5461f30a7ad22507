"""What makes the site out of the project: reference pages, tutorials with their output."""

"""What training minimizes; one file per objective."""

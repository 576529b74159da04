"""The published families: our model beside their references, and what is known of each."""

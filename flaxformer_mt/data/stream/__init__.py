"""From tokenised corpora to an endless, resumable stream of training batches."""

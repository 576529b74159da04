"""From a trained model to text: search, translation, scoring."""

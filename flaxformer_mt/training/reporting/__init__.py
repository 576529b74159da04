"""What a run reports while it trains: metrics, the terminal, speed and profiles."""

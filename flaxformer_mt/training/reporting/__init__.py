"""What a run reports while it trains: metrics, the terminal, callbacks, speed and profiles."""

"""What a run tells about itself: stage timers, records, the status line, metrics.jsonl."""

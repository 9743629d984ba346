"""What is sent and when; nothing here knows of sending."""

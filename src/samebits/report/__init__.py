"""One HTML page from the JSON that check, audit, model comparison and bench wrote. It computes nothing itself."""

"""What an entry is called and how it is sealed: keys, envelope, partition."""

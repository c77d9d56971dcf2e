"""The admin service's operations (drain, profile, reload), and the process's cache folder."""

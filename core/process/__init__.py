"""What every process of ours needs of its host: logs, signals, children, folders."""

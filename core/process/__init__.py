"""What every process of Baton needs from its host: logs, signals, children, folders."""

"""Why a serving system looks as it does: the schemes of its history, over one engine."""

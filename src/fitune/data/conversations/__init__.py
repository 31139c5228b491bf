"""From rows to conversations, and through chat templates to token ids with a mask over the answers."""

"""From files, URLs and the Hub to rows: nothing here knows what a row means."""

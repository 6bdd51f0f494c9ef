"""Where the files of a model are and what they say; no tensor is read here."""

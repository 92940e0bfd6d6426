"""Making a token store: chunks of rows, processes that tokenise, documents and their file."""

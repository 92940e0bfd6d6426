"""GGUF, the files of llama.cpp: one entry a model family, read in both directions.

``families.py`` holds the table. ``configuration.py`` and ``rotation.py`` apply it from a
configuration of transformers to the settings of a file and back, ``tensors.py`` from the tensors
of a model to those of a file and back. ``vocabulary.py`` describes a tokenizer in the
file's words, ``tokenizer.py`` makes one of them. ``reader.py`` and ``writer.py`` read and
write the files themselves, by the package ``gguf``; ``vision.py`` is about the second file, of
the part of a model that reads images.
"""

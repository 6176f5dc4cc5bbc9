"""The model on disk, cut by layer: its manifest, and the store that maps shards when they are needed."""

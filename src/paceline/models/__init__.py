"""Everything that knows a checkpoint: loading, the native decoder, the transformers fallback."""

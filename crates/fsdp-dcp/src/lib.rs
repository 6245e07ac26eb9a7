//! Checkpoint files: metadata, plans, the DCP and safetensors codecs, storage, durable commit.

//! get/set_state_dict and sharded checkpoints: save, load, retention.
